"""Mapping every token of the batch in all groups; and one group beside a NumPy one-liner."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.prepared import Prepared, ratio_beside
from tests.workloads import workload


def bench_slot_mapping(prepared: Prepared, benchmark: Any) -> None:
    idx_mapping, query_start_loc, positions, _ = prepared.tensors
    capacity = prepared.load.max_num_batched_tokens

    def compute() -> Any:
        return prepared.tables.compute_slot_mappings(
            idx_mapping, query_start_loc, positions, capacity
        )

    prepared.check_slots(compute())
    benchmark(compute)


@pytest.mark.parametrize("name", ["decode 256x6", "decode 1024x8", "prefill 1x8192x6"])
def bench_one_group_beside_numpy(name: str, benchmark: Any) -> None:
    """The one-liner does no checks, has no dummies, no faults and no tail."""
    full = workload(name)
    load = replace(full, groups=full.groups[:1], max_num_batched_tokens=full.num_tokens)
    prepared = Prepared(name, load)
    tables, num_tokens = prepared.tables, load.num_tokens
    idx_mapping, query_start_loc, positions, _ = prepared.tensors
    table, size = tables.block_tables[0].gpu.numpy(), load.groups[0].block_size
    rows_of_batch, lens, p = load.idx_mapping, np.diff(load.query_start_loc), load.positions
    out = np.empty((1, num_tokens), np.int64)

    def compute() -> Any:
        return tables.compute_slot_mappings(idx_mapping, query_start_loc, positions, num_tokens)

    def one_liner() -> None:
        out[0] = table[np.repeat(rows_of_batch, lens), p // size].astype(np.int64) * size + p % size

    prepared.check_slots(compute())
    one_liner()
    assert np.array_equal(out, compute().numpy()), "the peer is wrong"
    benchmark.extra_info.update(ratio_beside(compute, one_liner))
    benchmark(compute)
