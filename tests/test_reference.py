"""The scalar oracle against literal values and against brute force of another kind."""

from __future__ import annotations

import pytest

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.reference import (
    MappedToken,
    Outcome,
    gathered_row,
    map_token,
    slot_mappings,
)

PAGED = KVCacheGroup(16, 8)
SPLIT = KVCacheGroup(32, 4, kernel_block_size=16)
RING = KVCacheGroup(4, 1, circular=True)
STATE = KVCacheGroup(16, 8, slot_mapping_mode=SlotMappingMode.NONE)


@pytest.mark.parametrize(
    ("group", "row", "position", "slot", "outcome"),
    [
        (PAGED, [5, 9], 17, 145, Outcome.PAGED),
        (PAGED, [5], 16, -1, Outcome.COLUMN_OUT_OF_ROW),
        (PAGED, [], 0, -1, Outcome.COLUMN_OUT_OF_ROW),
        (PAGED, [5], -1, -1, Outcome.NEGATIVE_POSITION),
        (PAGED, None, 0, -1, Outcome.ROW_OUT_OF_RANGE),
        (SPLIT, [6, 7], 20, 116, Outcome.PAGED),
        (RING, [7], 130, 30, Outcome.RING),
        (RING, [], 3, -1, Outcome.EMPTY_RING),
        (RING, [], -3, -1, Outcome.NEGATIVE_POSITION),
        (STATE, [7], 3, -1, Outcome.STATE_GROUP),
        (STATE, None, -3, -1, Outcome.STATE_GROUP),
    ],
)
def test_one_token(
    group: KVCacheGroup, row: list[int] | None, position: int, slot: int, outcome: Outcome
) -> None:
    token = map_token(group, row, position)
    assert (token.slot, token.outcome) == (slot, outcome)


def test_the_numbers_on_the_way() -> None:
    cp = ContextParallel(size=2, rank=1, interleave=4)
    group = KVCacheGroup(32, 8, kernel_block_size=8)
    # v = 150 // 64 = 2, w = 22, owner (22 // 4) % 2 = 1, local = 2 * 4 + 2 = 10, col = 8 + 1.
    token = map_token(group, list(range(100, 112)), 150, cp)
    assert token == MappedToken(109 * 8 + 2, Outcome.PAGED, 2, 22, 1, 10, 9, 109, 2)
    other = map_token(group, list(range(100, 112)), 150, ContextParallel(2, 0, 4))
    assert other == MappedToken(-1, Outcome.OTHER_RANK, 2, 22, 1)


@pytest.mark.parametrize(
    ("position", "start", "window", "replayed"),
    [
        (4, 4, 4, True),
        (7, 4, 4, True),
        (8, 4, 4, False),
        (3, 4, 4, False),
        (0, 0, 4, False),  # 0 = nothing is replayed
        (4, 4, 0, False),
        (5, -4, 99, True),  # a start below zero still opens a window
    ],
)
def test_replay_window(position: int, start: int, window: int, replayed: bool) -> None:
    token = map_token(PAGED, [5], position, ContextParallel(), start, window)
    assert (token.outcome is Outcome.REPLAYED) == replayed
    private = KVCacheGroup(16, 8, prefix_cacheable=False)
    assert map_token(private, [5], position, ContextParallel(), start, window).slot == 80 + position


def test_replay_comes_before_a_missing_column_and_after_a_negative_position() -> None:
    arguments = (ContextParallel(), -5, 99)
    assert map_token(PAGED, [], 3, *arguments).outcome is Outcome.REPLAYED
    assert map_token(PAGED, [], -3, *arguments).outcome is Outcome.NEGATIVE_POSITION
    assert map_token(RING, [], 3, *arguments).outcome is Outcome.EMPTY_RING


@pytest.mark.parametrize(
    ("position", "start", "length", "replayed"),
    [
        (3, 4, 2, False),
        (4, 4, 2, True),
        (5, 4, 2, True),
        (6, 4, 2, False),
        (0, 0, 2, True),  # 0 is a start like any other
        (4, 4, 0, False),
        (4, 4, -7, False),
        (1, -3, 5, True),
        (2**31 + 100, 2**31 - 8, 109, True),
    ],
)
def test_a_length_of_replay_for_each_request(
    position: int, start: int, length: int, replayed: bool
) -> None:
    """It stands in for the window, whatever that is."""
    for window in (0, 99):
        token = map_token(PAGED, [5], position, ContextParallel(), start, window, length)
        assert (token.outcome is Outcome.REPLAYED) == replayed


def test_the_null_block_is_never_written() -> None:
    split = KVCacheGroup(32, 8, kernel_block_size=16)
    for group, row, position, slot in (
        (PAGED, [0, 7], 3, -1),
        (PAGED, [0, 7], 16, 112),
        (RING, [0], 6, -1),
        (split, [0, 1, 6, 7], 31, -1),
        (split, [2, 3], 31, 63),
    ):
        token = map_token(group, row, position, null_block_id=0)
        assert token.slot == slot
        assert (token.outcome is Outcome.NULL_BLOCK) == (slot < 0)
    assert map_token(split, [2, 3], 31, null_block_id=1).slot == -1
    assert map_token(PAGED, [0], 3).slot == 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 4, 12])
@pytest.mark.parametrize("kernel_block_size", [12, 4, 3])
def test_ranks_deal_tokens_round_robin_and_fill_their_blocks_in_order(
    size: int, interleave: int, kernel_block_size: int
) -> None:
    """Without the formula: each rank numbers the tokens it is dealt, from 0 on, and fills up."""
    group = KVCacheGroup(12, 8, kernel_block_size=kernel_block_size)
    row = [3 * column + 1 for column in range(8 * group.columns_per_block)]
    dealt = [0] * size
    for position in range(12 * size * 5):
        owner = position // interleave % size
        column, offset = divmod(dealt[owner], kernel_block_size)
        for rank in range(size):
            token = map_token(group, row, position, ContextParallel(size, rank, interleave))
            assert token.slot == (row[column] * kernel_block_size + offset if rank == owner else -1)
        dealt[owner] += 1


def test_a_batch_of_everything() -> None:
    groups = [PAGED, RING, STATE]
    rows = [[[5, 9], [3]], {1: [7]}, [[1], [2]]]
    got = slot_mappings(
        groups,
        rows,
        idx_mapping=[1, -1, 0, 2],
        query_start_loc=[0, 2, 3, 5, 6, 99],
        positions=[0, 1, 0, 15, 16, 0, 77],
        capacity=8,
    )
    assert got == [
        [48, 49, -1, 95, 144, -1, -1, -1],
        [28, 29, -1, -1, -1, -1, -1, -1],
        [-1] * 8,
    ]


def test_tokens_beyond_the_capacity_are_cut() -> None:
    assert slot_mappings([PAGED], [[[5]]], [0], [0, 4], [0, 1, 2, 3], 3) == [[80, 81, 82]]
    assert slot_mappings([PAGED], [[[5]]], [0], [0, 4], [0, 1, 2, 3], 0) == [[]]


def test_replay_start_goes_by_batch_entry() -> None:
    got = slot_mappings(
        [PAGED],
        [[[5], [6]]],
        [1, 0],
        [0, 2, 4],
        [1, 2, 1, 2],
        4,
        replay_start=[2, 0],
        replay_window=1,
    )
    assert got == [[97, -1, 81, 82]]


def test_no_groups_no_requests_no_tokens() -> None:
    assert slot_mappings([], [], [0], [0, 1], [0], 4) == []
    assert slot_mappings([PAGED], [[]], [], [0], [], 2) == [[-1, -1]]
    assert slot_mappings([PAGED], [[[5]]], [0], [0, 0], [], 2) == [[-1, -1]]


def test_gathered_row() -> None:
    window = KVCacheGroup(16, 8, sliding_window_reach=20)
    assert gathered_row(PAGED, [5, 6], 4) == [5, 6, 0, 0]
    assert gathered_row(PAGED, [5, 6], 4, num_computed_tokens=100) == [5, 6, 0, 0]
    assert gathered_row(window, [5, 6, 7], 4) == [5, 6, 7, 0]
    assert gathered_row(window, [5, 6, 7], 4, num_computed_tokens=36) == [0, 6, 7, 0]
    assert gathered_row(window, [5, 6, 7], 4, num_computed_tokens=35) == [5, 6, 7, 0]
    assert gathered_row(window, [5, 6, 7], 4, num_computed_tokens=10**6) == [0, 0, 0, 0]
    assert gathered_row(window, [5, 6, 7], 4, 36, ContextParallel(2)) == [5, 6, 7, 0]
