"""The v1 tables' rows under calls that nobody should make, and after their memory was lost."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import BlockTableError
from fused_slots.faults import FaultCode
from fused_slots.vllm import v1, v1_table
from fused_slots.vllm.v1 import BlockTable, MultiGroupBlockTable
from tests.test_vllm_v1 import CAPACITY, longs, make, slots, starts

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
NO_ROWS = (-1, 4, None, "0", 1.0, True, np.bool_(True), np.float32(0), [0], 2**40)


def filled() -> MultiGroupBlockTable:
    """Rows 0 and 3 hold blocks in each of the three groups, row 1 none."""
    tables = make()
    tables.add_row(([1, 2], [3], [4]), 0)
    tables.add_row(([5], [6, 7], [8]), 3)
    return tables


def state(tables: MultiGroupBlockTable) -> list[Any]:
    return [
        (table.block_table.np.tolist(), table.num_blocks_per_row.tolist())
        for table in tables.block_tables
    ]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_any_width_are_widened_before_they_are_multiplied(dtype: Any) -> None:
    tables = make(
        block_sizes=[32], max_num_blocks=[8], kernel_block_sizes=[16], slot_mapping_modes=None
    )
    low, high = (60, 61) if dtype in (np.int8,) else (200, 201)
    ids = np.array([low, high], dtype)
    tables.add_row([ids], 0)
    tables[0].append_row(list(ids), 0)
    columns = [2 * low, 2 * low + 1, 2 * high, 2 * high + 1]
    assert tables[0].block_table.np[0, :9].tolist() == [*columns, *columns, 0]
    assert BlockTable.map_to_kernel_blocks(ids, 2).tolist() == columns


@pytest.mark.parametrize(
    "ids", [np.array([1.0]), np.array([True]), [2.0], [True], np.zeros((1, 1))]
)
def test_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    tables = filled()
    before = state(tables)
    with pytest.raises(BlockTableError, match="group 1"):
        tables.append_row(([9], ids, []), 0)
    with pytest.raises(BlockTableError, match="group 1"):
        tables[1].append_row(ids, 0)
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        with pytest.raises(BlockTableError, match="block_ids: expected integers"):
            BlockTable.map_to_kernel_blocks(ids, 2)
    assert state(tables) == before


@pytest.mark.parametrize("block_id", [-1, 2**26, 2**31, 2**70])
def test_an_id_whose_columns_or_slots_fit_nothing_is_refused(block_id: int) -> None:
    tables = make(slot_dtype=torch.int32, block_sizes=[16, 32, 512])
    message = r"request row 2, group 1, entry 1: expected a block id in \[0, 67108863\]"
    with pytest.raises(BlockTableError, match=message):
        tables.add_row(([9], [1, block_id], []), 2)
    assert not any(table.num_blocks_per_row.any() for table in tables.block_tables)


@pytest.mark.parametrize("row", NO_ROWS, ids=repr)
@pytest.mark.parametrize("of_one_group", [False, True])
def test_what_is_no_row_is_refused_and_nothing_changes(row: Any, of_one_group: bool) -> None:
    tables = filled()
    ids: Any = [9] if of_one_group else ([9], [9], [9])
    target: Any = tables[1] if of_one_group else tables
    calls = {
        "row_idx": [
            lambda: target.append_row(ids, row),
            lambda: target.add_row(ids, row),
            lambda: target.clear_row(row),
        ],
        "src": [lambda: target.move_row(row, 0), lambda: target.swap_row(row, 0)],
        "tgt": [lambda: target.move_row(0, row), lambda: target.swap_row(0, row)],
    }
    before = state(tables)
    for argument, refused in calls.items():
        for call in refused:
            where = f"{argument} of group 1" if of_one_group else argument
            with pytest.raises(BlockTableError, match=rf"^{where}: expected a row in \[0, 4\)"):
                call()
    assert state(tables) == before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_row_of_any_integer_type_is_a_row(dtype: Any) -> None:
    tables = filled()
    tables.move_row(dtype(3), dtype(1))
    tables[0].append_row([9], dtype(1))
    assert tables[0].block_table.np[1, :3].tolist() == [5, 9, 0]


def test_columns_beyond_int32_are_not_cut() -> None:
    ids = np.array([2**30], np.int32)
    assert BlockTable.map_to_kernel_blocks(ids, 4).tolist() == [2**32 + i for i in range(4)]


def test_lengths_are_the_callers_to_read_only() -> None:
    tables = filled()
    with pytest.raises(ValueError, match="read-only"):
        tables[0].num_blocks_per_row[0] = 5
    tables.append_row(([9], [], []), 0)
    assert tables[0].num_blocks_per_row.tolist() == [3, 0, 0, 1]


@pytest.mark.parametrize("row", [2**32, -(2**32), 2**63 - 1, 2**63])
@pytest.mark.parametrize("as_array", [False, True])
def test_a_draft_row_beyond_int32_is_no_other_row(row: int, as_array: bool) -> None:
    tables = filled()
    tables.commit_block_table(4)
    tables._storage.manager.take_faults()
    rows = np.array([row, 3], np.uint64 if row == 2**63 else np.int64) if as_array else [row, 3]
    tables.compute_slot_mapping_draft(rows, [0, 1])
    assert slots(tables, 0, 3) == [-1, 81, -1]
    codes = {fault.code for fault in tables._storage.manager.take_faults()}
    assert codes == ({FaultCode.ROW_OUT_OF_RANGE} if row > 0 else set())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_drafts_of_any_integer_type_are_mapped(dtype: Any) -> None:
    tables = filled()
    tables.commit_block_table(4)
    rows, positions = np.array([3, 0], dtype), np.array([1, 17], dtype)
    tables.compute_slot_mapping_draft(rows, positions)
    assert slots(tables, 0, 3) == [81, 33, -1]
    tables[0].compute_slot_mapping_draft(torch.from_numpy(rows), torch.from_numpy(positions))
    assert slots(tables, 0, 3) == [81, 33, -1]


@pytest.mark.parametrize(
    "rows", [[True], [0.0], np.array([True]), np.array([0.5]), torch.tensor([0.0]), ["0"]]
)
def test_drafts_that_are_no_integers_are_refused(rows: Any) -> None:
    tables = filled()
    with pytest.raises(BlockTableError, match="req_indices: expected integers"):
        tables.compute_slot_mapping_draft(rows, [0])
    with pytest.raises(BlockTableError, match="positions: expected integers"):
        tables[0].compute_slot_mapping_draft([0], rows)


def test_replayed_slots_are_padded_whatever_the_length_of_positions() -> None:
    tables = make(
        block_sizes=[4], max_num_blocks=[4], kernel_block_sizes=None, slot_mapping_modes=None
    )
    tables.add_row([[3, 5]], 0)
    tables.commit_block_table(1)
    positions = torch.arange(CAPACITY + 9, dtype=torch.int64) + 2
    replay_start = torch.tensor([4], dtype=torch.int32)
    tables.compute_slot_mapping(1, starts(0, 6), positions)
    tables.pad_replayed_slots(1, starts(0, 6), positions, replay_start, 2)
    assert slots(tables, 0, 7) == [14, 15, -1, -1, 22, 23, -1]


def test_one_group_committed_whole_leaves_the_other_groups_tables() -> None:
    tables = filled()
    tables[1].commit_block_table(4)
    assert tables[1].block_table.gpu[3, :5].tolist() == [24, 25, 26, 27, 28]
    assert not tables[0].block_table.gpu.any()
    assert not tables[2].block_table.gpu.any()


def test_a_commit_sends_the_lengths_of_its_rows_alone() -> None:
    tables = filled()
    lengths = tables._storage.manager.num_blocks.gpu
    tables.commit_block_table(1)
    assert lengths[:, 0].tolist() == [2, 4, 1]
    assert not lengths[:, 1:].any()
    tables.commit_block_table(4)
    assert lengths[:, 3].tolist() == [1, 8, 1]


@pytest.mark.parametrize("new_ids", [[], [11]])
def test_after_its_memory_was_lost_every_row_is_as_committed(new_ids: list[int]) -> None:
    tables = filled()
    tables.commit_block_table(4)
    batch = (4, starts(0, 2, 2, 2, 4), longs(0, 17, 15, 3))
    tables.compute_slot_mapping(*batch)
    expected = [slots(tables, g, CAPACITY) for g in range(3)]
    storage = tables._storage
    manager = storage.manager
    for tensor in (
        storage._arena,
        manager.num_blocks.gpu,
        manager.slot_mappings,
        storage._batch_rows,
    ):
        tensor.fill_(77)
    storage._cacheable.fill_(False)
    tables.append_row((new_ids, [], []), 0)  # on the host only, as any row is before its commit
    tables.restore_device_memory()
    assert [slots(tables, g, CAPACITY) for g in range(3)] == [[-1] * CAPACITY] * 3
    tables.compute_slot_mapping(*batch)
    assert [slots(tables, g, CAPACITY) for g in range(3)] == expected
    for table in tables.block_tables:
        assert (table.block_table.gpu.numpy() == table.block_table.np).all()
    assert (manager.num_blocks.gpu.numpy() == manager.num_blocks.np).all()
    tables.pad_replayed_slots(*batch, torch.tensor([1, 0, 0, 0], dtype=torch.int32), 99)
    assert slots(tables, 0, 3) == [expected[0][0], -1, expected[0][2]]


def test_a_rings_replayed_tokens_are_written() -> None:
    sizes: dict[str, Any] = {"kernel_block_sizes": None, "slot_mapping_modes": None}
    tables = make(block_sizes=[4], max_num_blocks=[1], circular=[True], replay_window=4, **sizes)
    tables.add_row([[7]], 0)
    tables.commit_block_table(1)
    batch = (1, starts(0, 4), longs(4, 5, 6, 7))
    replay_start = torch.tensor([4], dtype=torch.int32)
    tables.compute_slot_mapping(*batch, replay_start=replay_start)
    assert slots(tables, 0, 5) == [28, 29, 30, 31, -1]
    tables.pad_replayed_slots(*batch, replay_start, 4)
    assert slots(tables, 0, 5) == [28, 29, 30, 31, -1]
    with pytest.raises(BlockTableError, match=r"groups\[0\]: max_num_blocks: expected 1"):
        make(block_sizes=[4], max_num_blocks=[3], circular=[True], **sizes)


def test_each_request_replays_as_much_as_it_says() -> None:
    tables = make(
        block_sizes=[4], max_num_blocks=[2], kernel_block_sizes=None, slot_mapping_modes=None
    )
    tables.add_row([[3]], 0)
    tables.add_row([[5]], 1)
    tables.commit_block_table(2)
    replay = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [1, 2])]
    tables.compute_slot_mapping(
        2, starts(0, 3, 6), longs(0, 1, 2, 0, 1, 2), replay_start=replay[0], replay_len=replay[1]
    )
    assert slots(tables, 0, 7) == [-1, 13, 14, 20, -1, -1, -1]


def test_no_group_is_a_number_of_groups() -> None:
    tables = make(
        block_sizes=[], max_num_blocks=[], kernel_block_sizes=None, slot_mapping_modes=None
    )
    tables.append_row((), 0)
    tables.commit_block_table(4)
    tables.compute_slot_mapping(1, starts(0, 1), longs(0))
    tables.compute_slot_mapping_draft([0], [0])
    tables.pad_replayed_slots(1, starts(0, 1), longs(0), torch.tensor([1], dtype=torch.int32), 4)
    tables.restore_device_memory()


def test_a_default_device_changes_nothing() -> None:
    query_start_loc, positions = starts(0, 2), longs(1, 17)
    replay_start = torch.tensor([17], dtype=torch.int32)
    with torch.device("meta"):
        tables = make()
        tables.add_row(([7, 2], [3], [4]), 0)
        tables.commit_block_table(1)
        tables.compute_slot_mapping(1, query_start_loc, positions)
        assert slots(tables, 0, 3) == [113, 33, -1]
        tables.pad_replayed_slots(1, query_start_loc, positions, replay_start, 1)
        assert slots(tables, 0, 3) == [113, -1, -1]
        tables.compute_slot_mapping_draft([0], [2])
        assert slots(tables, 1, 2) == [98, -1]
        tables.restore_device_memory()
        tables[0].compute_slot_mapping(1, query_start_loc, positions)
        assert slots(tables, 0, 3) == [113, 33, -1]


OLDER: dict[str, Any] = {
    "max_model_len": 100,
    "max_num_blocks": None,
    "block_sizes": [16, 48, 400],
    "kernel_block_sizes": [16, 24, 400],
    "slot_mapping_modes": None,
}


def test_rows_are_as_wide_as_vllm_0_22_to_0_25_makes_them() -> None:
    widths = [table.max_num_blocks_per_req for table in make(**OLDER).block_tables]
    assert widths == [8, 8, 1]
    newer = make(**OLDER | {"max_model_len": None, "max_num_blocks": [7, 3, 1]})
    assert [table.max_num_blocks_per_req for table in newer.block_tables] == [8, 16, 8]
    with pytest.raises(BlockTableError, match="max_num_blocks: expected a list, or max_model_len"):
        make(**OLDER | {"max_model_len": None})


def test_up_to_0_25_prefill_ranks_share_the_groups_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"pcp": (2, 1), "dcp": (3, 2)}
    for module in (v1, v1_table):
        monkeypatch.setattr(module, "parallel_group", ranks.__getitem__)
    tables = make(**OLDER | {"max_model_len": 1000, "block_sizes": [16], "kernel_block_sizes": [8]})
    assert tables[0].max_num_blocks_per_req == 2 * 16
    assert (tables[0].pcp_world_size, tables[0].pcp_rank) == (2, 1)
    assert (tables[0].dcp_world_size, tables[0].dcp_rank) == (3, 2)
    tables.add_row([[4]], 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 3), longs(4, 5, 95))
    assert slots(tables, 0, 3) == [-1, 64, 79]


def test_checked_tables_refuse_a_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_CHECKED", "1")
    tables = filled()
    in_a_call, leave = Event(), Event()

    def wait(*_: Any) -> None:
        in_a_call.set()
        assert leave.wait(60)

    monkeypatch.setattr(tables._storage, "_commit_lengths", wait)
    first = Thread(target=tables.commit_block_table, args=(2,))
    first.start()
    try:
        assert in_a_call.wait(60)
        before = state(tables)
        calls = (
            lambda: tables.append_row(([9], [9], [9]), 0),
            lambda: tables[0].append_row([9], 0),
            lambda: tables.swap_row(0, 3),
            lambda: tables.compute_slot_mapping(1, starts(0, 1), longs(0)),
        )
        for call in calls:
            with pytest.raises(BlockTableError, match="one thread at a time"):
                call()
        assert state(tables) == before
    finally:
        leave.set()
        first.join()
    tables.move_row(3, 1)
    tables.append_row(([9], [], []), 0)
    assert tables[0].num_blocks_per_row.tolist() == [3, 1, 0, 0]
