"""What only the CPU backend has: dirty extents, narrow products, shortcuts for powers of two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.backends import cpu
from fused_slots.reference import slot_mappings
from tests.backends_under_test import MakeTables, faults, gathered, int32, slots

make_tables = MakeTables("cpu")
PAGED = KVCacheGroup(16, 8)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 16, 48, 128, 2**31 - 1, 2**31])
def test_divmod_is_exact(divisor: int) -> None:
    values = np.array([0, 1, divisor - 1, divisor, divisor + 1, 2**53 + 1, 2**62, 2**63 - 1])
    quotient, remainder = cpu._divmod(values, divisor)
    assert quotient.tolist() == [value // divisor for value in values.tolist()]
    assert remainder.tolist() == [value % divisor for value in values.tolist()]


def test_union_of_masks() -> None:
    first, second = np.array([True, False]), np.array([False, False])
    assert cpu._union(None, None) is None
    assert cpu._union(first, None) is first
    assert cpu._union(None, second) is second
    union = cpu._union(first, second)
    assert union is not None
    assert union.tolist() == [True, False]
    assert cpu._any_or_none(second) is None
    assert cpu._any_or_none(first) is first


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("block_size", "interleave"), [(16, 4), (12, 3), (12, 12), (16, 1)])
def test_context_parallel_with_and_without_powers_of_two(
    size: int, block_size: int, interleave: int
) -> None:
    group = KVCacheGroup(block_size, 8)
    ids = [5, 2, 9, 7]
    positions = list(range(block_size * size * 4 + 3))
    for rank in range(size):
        parallel = ContextParallel(size, rank, interleave)
        tables = make_tables(
            [group], {0: [ids]}, context_parallel=parallel, max_num_batched_tokens=len(positions)
        )
        expected = slot_mappings(
            [group], [[ids]], [0], [0, len(positions)], positions, len(positions), parallel
        )
        assert slots(tables, [(0, positions)]) == expected
        owned = {fault[2] for fault in faults(tables)}
        missing = [p for p in positions[-3:] if p // interleave % size == rank]
        assert owned == ({len(missing)} if missing else set())


def test_a_missing_column_that_is_padded_anyway_is_no_fault() -> None:
    tables = make_tables([PAGED], {0: [[5]]}, replay_window=4, checked=True)
    assert slots(tables, [(0, [16, 17, 20]), (-1, [99])], replay_start=[16, 0]) == [[-1] * 4]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]


def test_replay_needs_a_window_and_a_start() -> None:
    tables = make_tables([PAGED], {0: [[5]]})
    assert slots(tables, [(0, [1, 2])], replay_start=[1]) == [[81, 82]]
    tables = make_tables([PAGED], {0: [[5]]}, replay_window=4)
    assert slots(tables, [(0, [1, 2])], replay_start=[5]) == [[81, 82]]
    extreme = [2**31 - 1]
    assert slots(tables, [(0, [2**31 - 2, 2**31 - 1, 2**31 + 2])], replay_start=extreme) == [
        [-1, -1, -1]
    ]
    # The window 2**31 - 1 ... 2**31 + 2 covers two of them; the other is a missing column.
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]


def test_int32_slots_of_stale_entries_do_not_overflow_into_live_ones() -> None:
    tables = make_tables([PAGED], {0: [[2**27 - 1, 2**27 - 1]]}, slot_dtype=torch.int32)
    tables.append_block_ids(0, [[1]], overwrite=True)
    tables.apply_staged_writes()
    tables.block_tables[0].gpu[0, 1:] = 2**31 - 1
    assert slots(tables, [(0, [3, 16, 40])]) == [[19, -1, -1]]


def test_an_out_of_another_dtype_takes_exact_slots() -> None:
    tables = make_tables([PAGED], {0: [[2**27 - 1]]}, slot_dtype=torch.int32)
    out = torch.zeros(1, 4, dtype=torch.int64)
    tables.compute_slot_mappings(
        int32(tables, [0]), int32(tables, [0, 1]), torch.tensor([15]), 1, out=out
    )
    assert out.tolist() == [[2**31 - 1, -1, -1, -1]]


def test_window_nulls_only_filled_columns() -> None:
    window = KVCacheGroup(16, 8, sliding_window_reach=16)
    tables = make_tables([window], {0: [[1, 2]], 1: [[3, 4, 5]]})
    computed = int32(tables, [10**6, 40, 0, 0])
    assert [row[:4] for row in gathered(tables, [0, 1], num_computed_tokens=computed)[0]] == [
        [0, 0, 0, 0],
        [0, 4, 5, 0],
    ]
    assert [row[:4] for row in gathered(tables, [1, 0])[0]] == [[3, 4, 5, 0], [1, 2, 0, 0]]


def test_window_is_not_nulled_under_context_parallelism() -> None:
    window = KVCacheGroup(16, 8, sliding_window_reach=16)
    tables = make_tables([window], {0: [[1, 2]]}, context_parallel=ContextParallel(2))
    computed = int32(tables, [10**6, 0, 0, 0])
    assert gathered(tables, [0], num_computed_tokens=computed)[0][0][:3] == [1, 2, 0]


def test_negative_computed_tokens_null_nothing() -> None:
    window = KVCacheGroup(16, 8, sliding_window_reach=16)
    tables = make_tables([window], {0: [[1, 2]]})
    computed = int32(tables, [-(2**31), 0, 0, 0])
    assert gathered(tables, [0], num_computed_tokens=computed)[0][0][:3] == [1, 2, 0]


def test_faults_are_forgotten_once_taken_and_detailed_when_checked() -> None:
    ring = KVCacheGroup(4, 1, circular=True)
    tables = make_tables([PAGED, ring], {0: [[5], [7]]}, checked=True)
    slots(tables, [(1, [3]), (9, [1])])
    gathered(tables, [9, 0])
    records = tables.take_faults()
    assert sorted(str(record) for record in records) == [
        "1 x column out of row in group 0 at row 1, token 0, position 3",
        "1 x empty ring in group 1 at row 1, token 0, position 3",
        "1 x row out of range in group 0 at row 9, token -1, position -1",
        "1 x row out of range in group 0 at row 9, token 1, position 1",
        "1 x row out of range in group 1 at row 9, token -1, position -1",
        "1 x row out of range in group 1 at row 9, token 1, position 1",
    ]
    assert tables.take_faults() == []


def test_unchecked_faults_have_no_place() -> None:
    tables = make_tables([PAGED], {0: [[5]]})
    slots(tables, [(1, [3, 4])])
    (record,) = tables.take_faults()
    assert (record.row, record.token, record.position) == (-1, -1, -1)
    assert str(record) == "2 x column out of row in group 0"


def test_the_cpu_plans_one_program_a_group_and_compiles_nothing() -> None:
    tables = make_tables([PAGED, PAGED])
    plan = tables.launch_plan(2, 9)
    assert plan.grid == (2, 1)
    assert "9 tokens" in plan.describe()
    assert "no compiled kernel" in plan.describe()
    assert tables.warmup().variants == []
