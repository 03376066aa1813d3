"""The derivation of a slot: its numbers, its words, and that it agrees with the manager."""

from __future__ import annotations

import pytest

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.faults import InvalidArgumentError
from fused_slots.reference import Outcome
from tests.backends_under_test import MakeTables, slots

GROUPS = [
    KVCacheGroup(16, 8, name="full"),
    KVCacheGroup(64, 4, kernel_block_size=32),
    KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(4, 1, circular=True, prefix_cacheable=False),
]
ROWS = {0: [[5, 6], [3], [1], [7]], 1: [list(range(1, 9)), [4, 2], [2], []]}


@pytest.fixture
def tables() -> AscendBlockTables:
    return MakeTables("cpu")(GROUPS, ROWS, replay_window=4)


def test_a_split_block_is_derived_number_by_number(tables: AscendBlockTables) -> None:
    assert str(tables.explain(1, 1, 100)).splitlines() == [
        "group 1, row 1, position 100",
        "  K = 64, B = 32, n = K/B = 2",
        "  the row has filled 4 columns: [8, 9, 4, 5]",
        "  v = 100 // 64 = 1",
        "  w = 100 mod 64 = 36",
        "  local = 36 * 1 + 0 = 36",
        "  col = 1 * 2 + 36 // 32 = 3",
        "  block id = table[row, 3] = 5",
        "  slot = 5 * 32 + 4 = 164",
        "slot = 164: a slot of a paged block",
    ]


def test_context_parallelism_names_the_owner() -> None:
    groups = [GROUPS[1], KVCacheGroup(16, 8, dcp_sharded=False)]
    tables = MakeTables("cpu")(
        groups, {0: [[4, 2], [9]]}, context_parallel=ContextParallel(2, 1, 8)
    )
    # w = 75, stripe 9 belongs to rank 1; local = 4 * 8 + 3.
    mine = tables.explain(0, 0, 75)
    assert mine.lines[1:] == (
        "  K = 64, B = 32, n = K/B = 2, S' = 2, c' = 1, I = 8",
        "  the row has filled 4 columns: [8, 9, 4, 5]",
        "  v = 75 // 128 = 0",
        "  w = 75 mod 128 = 75",
        "  owner = (75 // 8) mod 2 = 1",
        "  local = 4 * 8 + 3 = 35",
        "  col = 0 * 2 + 35 // 32 = 1",
        "  block id = table[row, 1] = 9",
        "  slot = 9 * 32 + 3 = 291",
        "slot = 291: a slot of a paged block",
    )
    other = tables.explain(0, 0, 64)
    assert (other.slot, other.outcome) == (-1, Outcome.OTHER_RANK)
    assert other.lines[-2:] == (
        "  owner = (64 // 8) mod 2 = 0",
        "slot = -1 (PAD): another context parallel rank owns the token",
    )
    assert "replicated: S' = 1, c' = 0" in tables.explain(1, 0, 3).lines[1]


@pytest.mark.parametrize(
    ("group", "row", "position", "start", "outcome", "line"),
    [
        (0, 0, 32, 0, Outcome.COLUMN_OUT_OF_ROW, "  col = 2 * 1 + 0 // 16 = 2"),
        (0, -1, 3, 0, Outcome.DUMMY, "group 0 (full), row -1, position 3"),
        (0, 0, -1, 0, Outcome.NEGATIVE_POSITION, "  the row has filled 2 columns: [5, 6]"),
        (0, 4, 3, 0, Outcome.ROW_OUT_OF_RANGE, "  K = 16, B = 16, n = K/B = 1"),
        (
            0,
            2**31 - 1,
            3,
            0,
            Outcome.ROW_OUT_OF_RANGE,
            "group 0 (full), row 2147483647, position 3",
        ),
        (0, 0, 5, 3, Outcome.REPLAYED, "  replay window: 3 <= 5 < 7"),
        (0, 1, 3, 0, Outcome.PAGED, "  the row has filled 8 columns: [1, 2, 3, 4, 5, 6, 7, 8]"),
        (2, 0, 3, 0, Outcome.STATE_GROUP, "  mode NONE, row width 1"),
        (2, -1, 3, 0, Outcome.STATE_GROUP, "  mode NONE, row width 1"),
        (2, 9, 3, 0, Outcome.STATE_GROUP, "  mode NONE, row width 1"),
        (3, 0, 130, 0, Outcome.RING, "  block id = table[row, 0] = 7"),
        (3, 0, 5, 3, Outcome.RING, "  circular: a ring of B = 4 slots"),
        (3, 1, 5, 0, Outcome.EMPTY_RING, "  the row has filled 0 columns: []"),
    ],
)
def test_every_outcome(
    tables: AscendBlockTables,
    group: int,
    row: int,
    position: int,
    start: int,
    outcome: Outcome,
    line: str,
) -> None:
    explanation = tables.explain(group, row, position, replay_start=start)
    assert explanation.outcome is outcome
    assert line in explanation.lines
    assert explanation.lines[-1].endswith(outcome.value)
    assert ("(PAD)" in explanation.lines[-1]) == (explanation.slot < 0)
    got = slots(tables, [(row, [position])], replay_start=[start])
    assert explanation.slot == got[group][0]


def test_every_slot_of_a_batch_is_explained_alike(tables: AscendBlockTables) -> None:
    positions = [0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 5000]
    for row in (0, 1, 2):
        got = slots(tables, [(row, positions)])
        for group in range(len(GROUPS)):
            explained = [tables.explain(group, row, position).slot for position in positions]
            assert explained == got[group]


def test_long_rows_are_shortened() -> None:
    tables = MakeTables("cpu")([KVCacheGroup(16, 16)], {0: [range(1, 13)]})
    assert "12 columns: [1, 2, 3, 4, 5, 6, 7, 8, ...]" in str(tables.explain(0, 0, 0))


def test_staged_writes_are_not_seen_before_they_are_applied(tables: AscendBlockTables) -> None:
    tables.append_block_ids(0, [[9], [], [], []], overwrite=False)
    assert tables.explain(0, 0, 32).outcome is Outcome.COLUMN_OUT_OF_ROW
    tables.apply_staged_writes()
    assert tables.explain(0, 0, 32).slot == 144


def test_no_group_to_explain() -> None:
    with pytest.raises(InvalidArgumentError, match="group"):
        MakeTables("cpu")([]).explain(0, 0, 0)
