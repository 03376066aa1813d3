"""Staging on the host: one step's `append_block_ids` calls of a steady workload."""

from typing import Any

from bench.prepared import Prepared

STEPS = 200


def bench_append(prepared: Prepared, benchmark: Any) -> None:
    tables = prepared.tables
    counts = []

    def next_appends() -> tuple[tuple[Any, ...], dict[str, Any]]:
        tables.apply_staged_writes()
        # A step without appends has nothing to time.
        while not (appends := prepared.next_step()):
            pass
        counts.append(len(appends))
        return (appends,), {}

    def stage(appends: Any) -> None:
        for row, block_ids, overwrite in appends:
            tables.append_block_ids(row, block_ids, overwrite)

    prepared.stage(prepared.next_step())
    tables.apply_staged_writes()
    *_, slots = tables.step(*prepared.tensors[:3])
    prepared.check_slots(slots)
    benchmark.pedantic(stage, setup=next_appends, rounds=STEPS)
    benchmark.extra_info["appends_per_step"] = sum(counts) / len(counts)
