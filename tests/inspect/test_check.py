"""`check_integrity`: silent on a healthy manager, and each broken invariant named."""

from __future__ import annotations

from collections.abc import Callable

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
