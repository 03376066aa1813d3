"""Gathering the batch's rows of all groups, with the sliding windows' nulls."""

from typing import Any

from bench.prepared import Prepared


def bench_gather(prepared: Prepared, benchmark: Any) -> None:
    idx_mapping, _, _, num_computed_tokens = prepared.tensors
    num_reqs = len(idx_mapping)

    def gather() -> Any:
        return prepared.tables.gather_block_tables(
            idx_mapping, num_reqs, num_computed_tokens=num_computed_tokens
        )

    prepared.check_tables(gather())
    benchmark(gather)
