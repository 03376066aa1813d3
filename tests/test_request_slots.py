"""Slots without a manager: as the scalar reference gives them, and refused where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_slots import (
    BlockTableError,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
    kernel_block_ids,
    slots_of,
)
from fused_slots.reference import map_token
from tests.backends_under_test import MakeTables, slots

PAGED = KVCacheGroup(16, 8, name="full")
RING = KVCacheGroup(4, 1, circular=True, prefix_cacheable=False)
INTEGER_TYPES = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


EDGES = [-(2**63), -1, 2**31 - 1, 2**31, 2**63 - 1]


def random_group(random: np.random.Generator) -> tuple[KVCacheGroup, ContextParallel]:
    """A group of any kind, and a rank that may share it."""
    size, interleave = int(random.integers(1, 5)), int(random.choice([1, 2, 4]))
    column = interleave * int(random.integers(1, 5))
    kind = random.choice(["paged", "paged", "ring", "state"])
    group = KVCacheGroup(
        column if kind == "ring" else column * int(random.integers(1, 4)),
        1 if kind == "ring" else 5,
        kernel_block_size=column,
        slot_mapping_mode=SlotMappingMode.NONE if kind == "state" else PAGED.slot_mapping_mode,
        circular=kind == "ring",
        prefix_cacheable=kind != "ring",
        dcp_sharded=kind != "ring" and bool(random.integers(2)),
    )
    return group, ContextParallel(size, int(random.integers(size)), interleave)


@pytest.mark.parametrize("null", [None, 0, 7])
def test_slots_are_those_of_the_scalar_reference(null: int | None) -> None:
    random = np.random.default_rng(0)
    mapped = 0
    for _ in range(200):
        group, rank = random_group(random)
        n = group.columns_per_block
        blocks = random.integers(0, 9, random.integers(group.max_num_blocks + 1))
        if random.random() < 0.2:
            blocks += 2**31 // n - 9
        positions = [*range(group.block_size * rank.size * (len(blocks) + 1) + 1), *EDGES]
        columns = kernel_block_ids(blocks, n).tolist()
        expected = [map_token(group, columns, position, rank) for position in positions]
        got = slots_of(group, blocks, positions, rank, null_block_id=null)
        assert got.dtype == np.int64
        assert got.tolist() == [
            -1 if null is not None and token.block_id // n == null else token.slot
            for token in expected
        ]
        mapped += int((got >= 0).sum())
    assert mapped > 1000


@given(st.lists(st.integers(0, 2**29 - 1), max_size=9), st.integers(1, 4))
def test_columns_are_those_of_the_rule(blocks: list[int], n: int) -> None:
    columns = kernel_block_ids(blocks, n)
    assert columns.dtype == np.int32
    assert columns.tolist() == [block * n + part for block in blocks for part in range(n)]


def test_slots_are_those_of_a_manager() -> None:
    groups = [PAGED, KVCacheGroup(32, 4, kernel_block_size=8), RING]
    tables = MakeTables("cpu")(groups, {0: [[5, 9], [3], [7]]})
    mapped = slots(tables, [(0, [0, 15, 16, 40, 31])])
    for g, blocks in enumerate([[5, 9], [3], [7]]):
        assert slots_of(groups[g], blocks, [0, 15, 16, 40, 31]).tolist() == mapped[g][:5]


@pytest.mark.parametrize("integer", INTEGER_TYPES)
def test_any_integer_type_is_widened_before_it_is_multiplied(integer: type) -> None:
    group = KVCacheGroup(32, 4, kernel_block_size=16)
    blocks, positions = np.array([100, 101], integer), np.array([31, 63], integer)
    assert slots_of(group, blocks, positions).tolist() == [3231, 3263]
    assert kernel_block_ids(blocks, 2).tolist() == [200, 201, 202, 203]
    assert slots_of(group, torch.tensor([100]), torch.tensor([31])).tolist() == [3231]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAGED, [3, -1], [0]), r"block_ids, entry 1: expected an id in \[0, 2147483647\].*-1"),
        (
            (KVCacheGroup(32, 4, kernel_block_size=16), [2**30], [0]),
            r"entry 0: expected an id in \[0, 1073741823\], whose 2 columns fit int32",
        ),
        ((PAGED, [2**31], [0]), "block_ids, entry 0: expected an id in .*; got 2147483648"),
        ((PAGED, [True, 2], [0]), "block_ids: expected .* integers; got a bool"),
        ((PAGED, [np.True_, 2], [0]), "block_ids: expected .* integers; got a bool"),
        ((PAGED, [1.0], [0]), "block_ids: expected .* integers; got 1-D float64"),
        ((PAGED, 3, [0]), "block_ids: expected .*; got 0-D int64"),
        ((PAGED, [[3]], [0]), "block_ids: expected .*; got 2-D int64"),
        ((PAGED, [[3], [3, 4]], [0]), "block_ids: expected a list or 1-D array of integers"),
        ((PAGED, [3], [2**63]), "positions: expected integers of int64; got 9223372036854775808"),
        ((PAGED, [3], [2**70]), "positions: expected .*; got 1-D object"),
        ((PAGED, [3], ["0"]), "positions: expected"),
        ((RING, [3, 4], [0]), "block_ids: expected one block: a ring; got 2 blocks"),
        (("full", [3], [0]), "group: expected a KVCacheGroup; got 'full'"),
        ((PAGED, [3], [0], 2), "context_parallel: expected a fused_slots.ContextParallel; got 2"),
        (
            (PAGED, [3], [0], ContextParallel(2, 0, 3)),
            r"interleave of the group \(full\): expected a divisor of block_size \(16\), .*; got 3",
        ),
        (
            (
                KVCacheGroup(4, 1, circular=True, dcp_sharded=True, prefix_cacheable=False),
                [3],
                [0],
                ContextParallel(2),
            ),
            "dcp_sharded of the group: expected False or None: a ring",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(BlockTableError, match=message):
        slots_of(*arguments)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(BlockTableError, match="null_block_id: expected an int in"):
        slots_of(PAGED, [3], [0], null_block_id=-1)
    with pytest.raises(BlockTableError, match="columns_per_block: expected an int in"):
        kernel_block_ids([3], 0)
    with pytest.raises(BlockTableError, match=r"entry 1: expected an id in \[0, 715827881\]"):
        kernel_block_ids([3, 2**30], 3)
