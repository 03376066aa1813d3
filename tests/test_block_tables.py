"""The manager as its owner sees it: attributes, addresses, launches and the order of effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.base_tables import CACHED_VIEWS
from fused_slots.reference import gathered_row, slot_mappings
from tests.backends_under_test import (
    BACKENDS,
    MakeTables,
    batch_tensors,
    faults,
    gathered,
    int32,
    int64,
    slots,
)

GROUPS = [
    KVCacheGroup(16, 8, name="full"),
    KVCacheGroup(64, 4, kernel_block_size=32, sliding_window_reach=40),
    KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(4, 1, circular=True, prefix_cacheable=False),
]
ROWS = {0: [[5, 6], [3], [1], [7]], 1: [[7], [4, 2], [2], [8]], 3: [[9], [1], [3], [9]]}


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    return request.param


@pytest.fixture
def tables(make_tables: MakeTables) -> AscendBlockTables:
    return make_tables(GROUPS, ROWS, replay_window=4)


def test_attributes_that_engines_read(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS[:3], context_parallel=ContextParallel(2, 1, 4))
    assert tables.block_sizes == [16, 64, 4096]
    assert tables.num_kv_cache_groups == 3
    assert (tables.cp_size, tables.cp_rank, tables.cp_interleave) == (2, 1, 4)
    assert (tables.max_num_reqs, tables.max_num_batched_tokens) == (4, 16)
    assert tables.slot_mappings.shape == (3, 16)
    assert [table.gpu.shape for table in tables.block_tables] == [(4, 8), (4, 8), (4, 1)]
    assert [table.shape for table in tables.input_block_tables] == [(4, 8), (4, 8), (4, 1)]
    assert all(table.gpu.dtype is torch.int32 for table in tables.block_tables)
    assert isinstance(tables.input_block_tables, list)
    assert tables.num_blocks.np.shape == tuple(tables.num_blocks.gpu.shape) == (3, 4)
    assert tables.redirect_writes_to_null_block is False
    assert tables.launches == 0


def test_state_groups_of_one_width_share_their_strides(make_tables: MakeTables) -> None:
    state = KVCacheGroup(4096, 2, slot_mapping_mode=SlotMappingMode.NONE)
    tables = make_tables([state, GROUPS[0], state])
    for views in ([t.gpu for t in tables.block_tables], tables.input_block_tables):
        assert views[0].stride() == views[2].stride() == (2, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slot_dtype(make_tables: MakeTables, dtype: torch.dtype) -> None:
    tables = make_tables(GROUPS[:1], {0: [[5]]}, slot_dtype=dtype)
    assert tables.slot_mappings.dtype is dtype
    assert tables.map_tokens(int32(tables, [0]), int64(tables, [1])).dtype is dtype
    assert slots(tables, [(0, [1])]) == [[81]]


def test_tables_taken_as_given_have_no_alignment(make_tables: MakeTables) -> None:
    tables = AscendBlockTables(
        block_sizes=[16, 64],
        max_num_reqs=2,
        max_num_batched_tokens=4,
        max_num_blocks_per_group=[3, 5],
        kernel_block_sizes=[16, 16],
        circular=[False, False],
        prefix_cacheable=[True, False],
        dcp_sharded=[True, False],
        sliding_window_reach=[0, 7],
        cp_size=2,
        cp_rank=1,
        cp_interleave=8,
        device=make_tables.device,
        num_blocks=[10, 20],
        replay_window=2,
        slot_dtype=torch.int32,
        checked=True,
    )
    assert tables.layout.widths == (3, 20)
    assert tables.layout.groups[1] == KVCacheGroup(
        64, 5, 16, dcp_sharded=False, prefix_cacheable=False, sliding_window_reach=7
    )
    assert tables.layout.context_parallel == ContextParallel(2, 1, 8)
    assert tables.layout.num_blocks == (10, 20)
    assert tables.layout.replay_window == 2


def test_every_buffer_keeps_its_address(tables: AscendBlockTables) -> None:
    def addresses() -> list[int]:
        buffers = [
            tables.slot_mappings,
            tables.num_blocks.gpu,
            *tables.input_block_tables,
            *(table.gpu for table in tables.block_tables),
        ]
        return [buffer.data_ptr() for buffer in buffers]

    before = addresses()
    batch = batch_tensors(tables, [(0, [0, 1]), (1, [2])])
    for _ in range(3):
        tables.append_block_ids(2, ROWS[1], overwrite=True)
        block_tables, slot_mappings = tables.step(*batch, num_reqs_padded=3)
        views = [*block_tables, slot_mappings]
        tables.init_block_table_layout_tensors()
        dummies = [*tables.get_dummy_block_tables(2), tables.get_dummy_slot_mappings(4)]
        tables.compute_slot_mappings(*batch, 3)
        tables.apply_staged_writes()
    assert addresses() == before
    owned = [*tables.input_block_tables, tables.slot_mappings]
    for got in (views, dummies):
        assert [v.data_ptr() for v in got] == [buffer.data_ptr() for buffer in owned]


def test_each_operation_is_one_launch(tables: AscendBlockTables) -> None:
    batch = batch_tensors(tables, [(0, [0, 1]), (1, [2])])
    idx_mapping = batch[0]

    def launches_of(call: Any) -> int:
        before = tables.launches
        call()
        return tables.launches - before

    assert launches_of(tables.apply_staged_writes) == 0
    assert launches_of(lambda: tables.append_block_ids(2, ROWS[1], overwrite=True)) == 0
    assert launches_of(tables.apply_staged_writes) == 1
    assert launches_of(lambda: tables.gather_block_tables(idx_mapping, 2)) == 1
    assert launches_of(lambda: tables.compute_slot_mappings(*batch, 3)) == 1
    assert launches_of(lambda: tables.map_tokens(idx_mapping, batch[2][:2])) == 1
    for pending in (True, False):
        if pending:
            tables.append_block_ids(2, ROWS[1], overwrite=True)
        assert launches_of(lambda: tables.step(*batch)) == 1


def test_a_step_is_its_three_parts(make_tables: MakeTables) -> None:
    batch = [(1, [0, 40, 100]), (-1, [0]), (0, [16, 17]), (2, [3])]
    replay = [38, 0, 0, 0]
    results = []
    for in_one in (True, False):
        tables = make_tables(GROUPS, ROWS, replay_window=4)
        tables.append_block_ids(2, [[4, 4], [2, 1], [6], [5]], overwrite=True)
        tables.append_block_ids(0, [[8], [], [], []], overwrite=False)
        tensors = batch_tensors(tables, batch)
        computed = int32(tables, [30, 100, 200, 0])
        replay_start = int32(tables, replay)
        if in_one:
            block_tables, slot_mappings = tables.step(
                *tensors,
                num_reqs_padded=4,
                num_tokens_padded=9,
                num_computed_tokens=computed,
                replay_start=replay_start,
            )
        else:
            tables.apply_staged_writes()
            block_tables = tables.gather_block_tables(tensors[0], 4, num_computed_tokens=computed)
            slot_mappings = tables.compute_slot_mappings(*tensors, 9, replay_start=replay_start)
        counted = faults(tables)
        results.append(([t.tolist() for t in block_tables], slot_mappings.tolist(), counted))
    assert results[0] == results[1]
    assert results[0][2] == [("COLUMN_OUT_OF_ROW", 0, 1)]  # position 40 is replayed


def test_a_step_agrees_with_the_oracle(tables: AscendBlockTables) -> None:
    batch = [(1, [0, 40, 100, 15]), (-1, [0]), (0, [16, 17, -2]), (0, [3]), (3, [0, 5])]
    idx_mapping, query_start_loc, positions = batch_tensors(tables, batch)
    rows = [{row: _columns(g, ids[g]) for row, ids in ROWS.items()} for g in range(len(GROUPS))]
    replay = [39, 0, 0, 3, 5]
    computed = [30, 100, 0, 8]
    with pytest.raises(ValueError, match="at most 4 entries"):
        tables.step(idx_mapping, query_start_loc, positions)
    tables.compute_slot_mappings(
        idx_mapping, query_start_loc, positions, 16, replay_start=int32(tables, replay)
    )
    assert tables.slot_mappings.tolist() == slot_mappings(
        GROUPS,
        rows,
        idx_mapping.tolist(),
        query_start_loc.tolist(),
        positions.tolist(),
        16,
        replay_start=replay,
        replay_window=4,
    )
    got = gathered(tables, [3, 1, -1, 0], num_computed_tokens=int32(tables, computed))
    for g, group in enumerate(GROUPS):
        for batch_index, row in enumerate([3, 1, -1, 0]):
            expected = gathered_row(
                group, rows[g].get(row, ()), tables.layout.widths[g], computed[row]
            )
            assert got[g][batch_index] == expected


def _columns(g: int, block_ids: list[int]) -> list[int]:
    n = GROUPS[g].columns_per_block
    return [block_id * n + part for block_id in block_ids for part in range(n)]


def test_writes_reach_the_device_with_the_step_and_not_before(tables: AscendBlockTables) -> None:
    tables.append_block_ids(0, [[8], [], [], []], overwrite=False)
    assert slots(tables, [(0, [32])])[0] == [-1]
    assert gathered(tables, [0])[0][0][:4] == [5, 6, 0, 0]
    assert tables.num_blocks.np[0, 0] == 3
    assert tables.num_blocks.gpu[0, 0] == 2
    block_tables, slot_mappings = tables.step(*batch_tensors(tables, [(0, [32])]))
    assert block_tables[0][0].tolist()[:4] == [5, 6, 8, 0]
    assert slot_mappings[0, 0] == 128
    assert tables.num_blocks.gpu[0, 0] == 3


@pytest.mark.parametrize("sizes", [(4, 1, 3, 0, 2, 4), (1, 4, 4, 0, 0, 3)])
def test_gathered_tables_show_only_the_batch_whatever_came_before(
    tables: AscendBlockTables, sizes: tuple[int, ...]
) -> None:
    order = [0, 1, 3, 0]
    for turn, size in enumerate(sizes):
        rows = [order[(turn + place) % 4] for place in range(size)]
        padded = min(size + turn % 2, 4)
        tables.gather_block_tables(int32(tables, rows), padded)
        for g, table in enumerate(tables.input_block_tables):
            expected = [
                gathered_row(GROUPS[g], _columns(g, ROWS[r][g]), table.shape[1]) for r in rows
            ]
            blank = [[0] * table.shape[1]] * (4 - size)
            assert table.tolist() == expected + blank
        if turn == 2:  # an engine's dummy run writes into what it is given
            for table in tables.get_dummy_block_tables(3):
                table.fill_(99)


def test_dummy_tables_of_no_rows_clear_everything(tables: AscendBlockTables) -> None:
    gathered(tables, [0, 1, 3])
    assert [table.shape[0] for table in tables.get_dummy_block_tables(0)] == [0] * 4
    assert not any(table.any() for table in tables.input_block_tables)


def test_whole_output_is_written_over_a_sentinel(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.slot_mappings.fill_(777777)
    slots(tables, [(0, [0]), (-1, [0, 0]), (1, [2])])
    assert not tables.slot_mappings.eq(777777).any()
    tables.slot_mappings.fill_(777777)
    slots(tables, [])
    assert tables.slot_mappings.eq(-1).all()
    for table in tables.input_block_tables:
        table.zero_()
    out = [torch.full_like(table, 777777) for table in tables.input_block_tables]
    tables.gather_block_tables(int32(tables, [0, -1]), 4, out=out)
    assert not any(table.eq(777777).any() for table in out)


def test_poison_beyond_filled_columns_never_shows(tables: AscendBlockTables) -> None:
    for g, table in enumerate(tables.block_tables):
        filled = tables.num_blocks.gpu[g]
        columns = torch.arange(table.gpu.shape[1], device=tables.device)
        table.gpu[columns >= filled[:, None]] = 1_000_000
    got = slots(tables, [(0, [0, 32, 100]), (2, [0, 5]), (1, [20, 200])])
    assert max(max(group_slots) for group_slots in got) < 1000
    assert max(max(max(row) for row in table) for table in gathered(tables, [0, 1, 2, 3])) < 100
    assert sum(count for _, _, count in faults(tables)) > 0


def test_launch_plan_and_warmup_answer(tables: AscendBlockTables) -> None:
    plan = tables.launch_plan(4, 16, max_query_len=3)
    assert plan.grid
    assert str(plan.grid[0]) in plan.describe()
    assert tables.launch_plan(0, 0).describe()
    report = tables.warmup()
    assert report.seconds >= 0
    assert list(report.variants) == sorted(set(report.variants), key=report.variants.index)


def test_explain_and_check_integrity_are_reachable(tables: AscendBlockTables) -> None:
    explanation = tables.explain(1, 1, 40)
    assert explanation.slot == slots(tables, [(1, [40])])[1][0]
    assert "slot = " in str(explanation)
    tables.check_integrity()


def test_warmup_and_layout_leave_results_alone(tables: AscendBlockTables) -> None:
    before = slots(tables, [(0, [0, 17]), (1, [2])]), gathered(tables, [0, 1])
    tables.warmup()
    tables.init_block_table_layout_tensors()
    assert (slots(tables, [(0, [0, 17]), (1, [2])]), gathered(tables, [0, 1])) == before
    assert faults(tables) == []


def test_every_number_of_rows_gets_its_own_views(make_tables: MakeTables) -> None:
    """More sizes than are remembered, and back."""
    sizes = [*range(CACHED_VIEWS + 3), 1, CACHED_VIEWS, 0]
    tables = make_tables(GROUPS[:2], {0: [[5], [3]]}, max_num_reqs=CACHED_VIEWS + 3)
    for size in sizes:
        got = tables.gather_block_tables(int32(tables, [0][:size]), size)
        assert [table.shape[0] for table in got] == [size, size]
        owned = tables.input_block_tables
        assert [t.data_ptr() for t in got if size] == [t.data_ptr() for t in owned if size]
        assert [table.shape[0] for table in tables.get_dummy_block_tables(size)] == [size, size]
