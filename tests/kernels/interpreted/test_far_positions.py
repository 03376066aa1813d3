"""Positions that no row reaches, up to the largest int64, in watched memory.

A column computed from a clamped position once overflowed to a negative one under context
parallelism, and the table was read far outside.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.faults import FaultCode
from fused_slots.reference import Outcome, map_token
from tests.backends_under_test import MakeTables

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
FAR = [INT32_MAX - 1, INT32_MAX, INT32_MAX + 1, INT32_MAX + 2, 2**32 + 5, 2**40 + 1, INT64_MAX]
FAULTS = {
    Outcome.COLUMN_OUT_OF_ROW: FaultCode.COLUMN_OUT_OF_ROW,
    Outcome.EMPTY_RING: FaultCode.EMPTY_RING,
}


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_far_positions_are_padded_counted_and_read_nothing(
    make_tables: MakeTables, size: int
) -> None:
    groups = [
        KVCacheGroup(3, 4, kernel_block_size=1),
        KVCacheGroup(32, 4, kernel_block_size=8),
        KVCacheGroup(3, 4, kernel_block_size=1, dcp_sharded=False),
        KVCacheGroup(1, 6, dcp_sharded=False),
    ]
    if size == 1:
        groups.append(KVCacheGroup(5, 1, circular=True))
    rank = ContextParallel(size=size, rank=size - 1, interleave=1)
    ids = [[2]] * len(groups)
    tables = make_tables(groups, {0: ids, 3: ids}, context_parallel=rank)
    rows = [table.gpu[3, : tables.num_blocks.np[g, 3]].tolist()
            for g, table in enumerate(tables.block_tables)]  # fmt: skip
    starts = torch.tensor([0, len(FAR)], dtype=torch.int32)
    tables.compute_slot_mappings(torch.tensor([3]), starts, torch.tensor(FAR), len(FAR))
    expected, faults = [], Counter[tuple[int, int]]()
    for g, group in enumerate(groups):
        mapped = [map_token(group, rows[g], position, rank) for position in FAR]
        expected.append([token.slot for token in mapped])
        faults.update((FAULTS[t.outcome], g) for t in mapped if t.outcome in FAULTS)
    assert tables.slot_mappings[:, : len(FAR)].tolist() == expected
    assert {(fault.code, fault.group): fault.count for fault in tables.take_faults()} == faults
