"""`check_integrity`: silent on a healthy manager, and each broken invariant named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.faults import IntegrityError
from fused_slots.inspect.check import MAX_LISTED
from tests.backends_under_test import MakeTables, gathered, slots

GROUPS = [
    KVCacheGroup(16, 8, name="full"),
    KVCacheGroup(64, 4, kernel_block_size=32),
    KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(4, 1, circular=True),
]
ROWS = {0: [[5, 6], [3], [1], [7]], 1: [[7], [4, 2], [1], [7]]}


@pytest.fixture
def tables() -> AscendBlockTables:
    tables = MakeTables("cpu")(GROUPS, ROWS, num_blocks=[20, None, None, None])
    slots(tables, [(0, [0, 1]), (1, [2])])
    return tables


def test_a_healthy_manager_passes_at_every_moment(tables: AscendBlockTables) -> None:
    assert tables.check_integrity() is None
    tables.append_block_ids(2, [[1], [2, 3], [4], [5]], overwrite=True)
    tables.append_block_ids(0, [[], [], [], []], overwrite=True)
    tables.check_integrity()  # staged rows are judged by the device's
    tables.apply_staged_writes()
    tables.check_integrity()
    gathered(tables, [0, 1, 2])
    tables.get_dummy_block_tables(2)
    tables.get_dummy_slot_mappings(3)
    tables.check_integrity()
    MakeTables("cpu")([]).check_integrity()


def test_stale_entries_beyond_the_filled_columns_are_no_finding(tables: AscendBlockTables) -> None:
    tables.block_tables[0].gpu[0, 2:] = -5
    tables.block_tables[1].gpu[0, 2:] = 7
    tables.check_integrity()


def test_ended_requests_may_share_blocks_with_live_ones(tables: AscendBlockTables) -> None:
    tables.append_block_ids(2, ROWS[0], overwrite=True)
    tables.apply_staged_writes()
    slots(tables, [(2, [0, 1])])
    tables.check_integrity()


def test_every_slot_of_the_null_block_may_be_written_twice(tables: AscendBlockTables) -> None:
    """Those of its second column, too, where blocks of 64 tokens are split in two."""
    tables.append_block_ids(0, [[5], [0], [1], [7]], overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(0, [40]), (0, [40])])[1][:2] == [40, 40]
    tables.check_integrity()


def test_null_block_and_rings_may_be_written_twice(tables: AscendBlockTables) -> None:
    tables.append_block_ids(0, [[0], [0], [1], [7]], overwrite=True)
    tables.apply_staged_writes()
    got = slots(tables, [(0, [3, 3, 3, 3]), (0, [7])])
    assert got[0][:2] == [3, 3]
    assert got[3][0] == got[3][4]
    tables.check_integrity()


Damage = Callable[[AscendBlockTables], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "id negative": (
        lambda tables: tables.block_tables[0].gpu[0, 1].fill_(-1),
        r"block_tables\[0\]\.gpu\[0, 1\] = -1 is no block of group 0 \(full\) "
        r"\(columns go from 0 to 19\)",
    ),
    "id of the pool's size": (
        lambda tables: tables.block_tables[0].gpu[1, 0].fill_(20),
        r"block_tables\[0\]\.gpu\[1, 0\] = 20 is no block",
    ),
    "split block torn": (
        lambda tables: tables.block_tables[1].gpu[1, 1].fill_(8),
        r"block_tables\[1\]\.gpu\[1, 1\] = 8 is not part 1 of an allocation block split in 2",
    ),
    "split block of two halves": (
        lambda tables: tables.block_tables[1].gpu[1, 1].fill_(11),
        r"block_tables\[1\]\.gpu\[1, 1\] = 11 is not part 1",
    ),
    "split block that begins in the middle": (
        lambda tables: tables.block_tables[1].gpu[0, :2].copy_(torch.tensor([7, 8])),
        r"block_tables\[1\]\.gpu\[0, 0\] = 7 is not part 0",
    ),
    "host length negative": (
        lambda tables: tables._rows.num_columns[0].__setitem__(3, -1),
        r"num_blocks\.np\[0, 3\] = -1 is not a multiple of 1 in \[0, 8\]",
    ),
    "host length beyond the row": (
        lambda tables: tables._rows.num_columns[0].__setitem__(3, 9),
        r"num_blocks\.np\[0, 3\] = 9 is not",
    ),
    "host length of half a block": (
        lambda tables: (
            tables._rows.num_columns[1].__setitem__(0, 3),
            tables.num_blocks.gpu[1, 0].fill_(3),
        ),
        r"num_blocks\.np\[1, 0\] = 3 is not a multiple of 2",
    ),
    "device length differs": (
        lambda tables: tables.num_blocks.gpu[0, 1].fill_(0),
        r"num_blocks\[0, 1\] is 1 on the host and 0 on the device, with nothing staged",
    ),
    "slots replaced": (
        lambda tables: setattr(tables, "slot_mappings", tables.slot_mappings.clone()),
        "slot_mappings was replaced by another tensor",
    ),
    "source table replaced": (
        lambda tables: tables.block_tables.__setitem__(
            1, type(tables.block_tables[1])(tables.block_tables[1].gpu.clone())
        ),
        r"block_tables\[1\]\.gpu was replaced",
    ),
    "gathered table replaced": (
        lambda tables: tables.input_block_tables.__setitem__(
            2, tables.input_block_tables[2].clone()
        ),
        r"input_block_tables\[2\] was replaced",
    ),
    "two tokens on one slot": (
        lambda tables: tables.slot_mappings[0, 2].fill_(80),
        r"slot 80 of group 0 \(full\) is written by 2 tokens of the last step, the first is "
        "token 0",
    ),
    "one row twice in a step": (
        lambda tables: slots(tables, [(0, [5]), (1, [5]), (0, [5])]),
        r"slot 85 of group 0.*slot 197 of group 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_found_and_named(tables: AscendBlockTables, case: tuple[Damage, str]) -> None:
    damage, message = case
    tables.check_integrity()
    damage(tables)
    with pytest.raises(IntegrityError, match=message):
        tables.check_integrity()


def test_all_findings_are_listed_up_to_a_limit(tables: AscendBlockTables) -> None:
    tables.block_tables[0].gpu[0, :2] = -1
    with pytest.raises(IntegrityError) as raised:
        tables.check_integrity()
    assert raised.value.actual.count(" is no block") == 2
    tables.append_block_ids(2, [[1] * 8, [], [], []], overwrite=True)
    tables.append_block_ids(3, [[1] * 8, [], [], []], overwrite=True)
    tables.append_block_ids(1, [[1] * 8, [], [], []], overwrite=True)
    tables.apply_staged_writes()
    tables.block_tables[0].gpu.fill_(-1)
    with pytest.raises(IntegrityError) as raised:
        tables.check_integrity()
    assert raised.value.actual.count(" is no block") == MAX_LISTED
    assert raised.value.actual.endswith(f"; and {2 + 3 * 8 - MAX_LISTED} more")


def test_a_colliding_interleave_would_be_found() -> None:
    """The check that construction makes impossible: two positions of one request on one slot."""
    tables = MakeTables("cpu")(GROUPS[:1], {0: [[5]]}, context_parallel=ContextParallel(2))
    got = slots(tables, [(0, [0, 2, 4])])
    tables.check_integrity()
    tables.slot_mappings[0, 1] = got[0][2]
    with pytest.raises(IntegrityError, match="written by 2 tokens"):
        tables.check_integrity()


PRIVATE = KVCacheGroup(16, 4, prefix_cacheable=False, name="private")


def shared_row(tables: AscendBlockTables, *ids: list[list[int]]) -> AscendBlockTables:
    for row, block_ids in enumerate(ids):
        tables.append_block_ids(row, block_ids, overwrite=True)
    rows = torch.tensor(range(len(ids)), dtype=torch.int32)
    tables.apply_staged_writes()
    tables.gather_block_tables(rows, len(ids))
    return tables


def build_groups(*groups: KVCacheGroup, **settings: Any) -> AscendBlockTables:
    return AscendBlockTables.from_groups(
        groups, max_num_reqs=4, max_num_batched_tokens=8, **settings
    )


def test_a_block_of_two_live_rows_is_found_though_they_never_write_in_one_step() -> None:
    tables = shared_row(build_groups(PRIVATE), [[7, 3]], [[2, 7]], [[0]])
    with pytest.raises(
        IntegrityError,
        match=r"block 7 of group 0 \(private\), which shares none, is held by row 0 and by row 1",
    ):
        tables.check_integrity()
    tables.clear_row(1)  # given back: its blocks are others' now
    tables.check_integrity()
    for block, found in ((5, False), (3, True)):
        tables.append_block_ids(1, [[block]], overwrite=True)
        tables.apply_staged_writes()
        tables.gather_block_tables(torch.tensor([0, 1], dtype=torch.int32), 2)
        with (
            pytest.raises(IntegrityError, match="held by row 0 and by row 1")
            if found
            else nullcontext()
        ):
            tables.check_integrity()


def test_rows_outside_the_last_gather_may_hold_what_they_held() -> None:
    tables = shared_row(build_groups(PRIVATE), [[7, 3]], [[2, 7]])
    tables.gather_block_tables(torch.tensor([1, -1, 9], dtype=torch.int64), 3)
    tables.check_integrity()


def test_a_cacheable_group_shares_blocks_and_explain_lists_who() -> None:
    split = KVCacheGroup(32, 4, kernel_block_size=16)
    tables = shared_row(build_groups(split), [[7, 3]], [[7, 4]], [[7]], [[1]])
    tables.check_integrity()
    assert "block 7 is shared with rows 1, 2" in str(tables.explain(0, 0, 17))
    assert "shared" not in str(tables.explain(0, 0, 40))


@pytest.mark.parametrize("pools", [("a", "a", True), ("a", "b", False), ("", "", False)])
def test_an_id_in_two_groups_of_one_pool_is_found(pools: tuple[str, str, bool]) -> None:
    first, second, found = pools
    tables = build_groups(KVCacheGroup(16, 4, pool=first), KVCacheGroup(32, 4, pool=second))
    shared_row(tables, [[7, 0], [3, 0]], [[2], [7]])
    if not found:
        tables.check_integrity()
        return
    with pytest.raises(
        IntegrityError, match="block 7 of pool 'a' is held in group 0 and in group 1"
    ):
        tables.check_integrity()


def test_a_block_below_the_window_may_be_handed_out_again() -> None:
    group = KVCacheGroup(
        16, 4, kernel_block_size=8, prefix_cacheable=False, sliding_window_reach=7, name="window"
    )
    tables = shared_row(build_groups(group), [[7, 3]], [[2, 7]])
    rows = torch.tensor([0, 1], dtype=torch.int32)
    for computed, found in ((22, True), (23, False)):  # 23 - 7 = 16: block 0 lies below
        num_computed_tokens = torch.tensor([computed, 0, 0, 0], dtype=torch.int32)
        tables.gather_block_tables(rows, 2, num_computed_tokens=num_computed_tokens)
        with (
            pytest.raises(IntegrityError, match=r"block 7 of group 0 \(window\), .* row 1")
            if found
            else nullcontext()
        ):
            tables.check_integrity()


def test_an_edited_gathered_cell_is_found_until_the_gather_is_whole_again() -> None:
    tables = shared_row(build_groups(KVCacheGroup(16, 4, sliding_window_reach=9)), [[5, 6]])
    tables.check_integrity()
    tables.input_block_tables[0][0, 3] = 9
    with pytest.raises(
        IntegrityError,
        match=r"input_block_tables\[0\]\[0, 3\] is 9, the gather wrote 0.*invalidate_gathered",
    ):
        tables.check_integrity()
    tables.invalidate_gathered()
    tables.check_integrity()  # its caller has said so
    computed = torch.tensor([40] * 4, dtype=torch.int32)
    rows = torch.tensor([0], dtype=torch.int32)
    tables.gather_block_tables(rows, 1, num_computed_tokens=computed)
    tables.check_integrity()  # a column below the window is zero
    for table in tables.get_dummy_block_tables(2):
        table.fill_(3)  # the caller's to write
    tables.check_integrity()
    tables.gather_block_tables(rows, 1)
    tables.append_block_ids(0, [[8]], overwrite=True)
    tables.apply_staged_writes()
    tables.check_integrity()  # rows have changed since


def test_explain_and_check_say_null_block() -> None:
    batch = [torch.tensor(values, dtype=torch.int32) for values in ([0], [0, 2])]
    positions = torch.tensor([3, 16])
    for null, written in ((None, [3, 112]), (0, [-1, 112])):
        tables = shared_row(build_groups(KVCacheGroup(16, 4), null_block_id=null), [[0, 7]])
        assert tables.step(*batch, positions)[1][0, :2].tolist() == written
        tables.check_integrity()
        explained = tables.explain(0, 0, 3)
        assert explained.slot == written[0]
        assert "block 0 is the null block" in str(explained)
    tables.slot_mappings[0, 0] = 5  # as no kernel writes it
    with pytest.raises(IntegrityError, match=r"1 tokens .* null block \(0\) of group 0.*token 0"):
        tables.check_integrity()


def test_gathered_tables_that_were_lost_are_nobodys_edit(tables: AscendBlockTables) -> None:
    gathered(tables, [0, 1])
    for table in tables.input_block_tables:
        table.fill_(9)
    tables.init_block_table_layout_tensors()
    tables.check_integrity()
