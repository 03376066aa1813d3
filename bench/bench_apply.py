"""Writing one step's staged appends to all groups' tables."""

from typing import Any

from bench.prepared import Prepared

STEPS = 200


def bench_apply(prepared: Prepared, benchmark: Any) -> None:
    tables = prepared.tables

    def next_writes() -> None:
        while not (appends := prepared.next_step()):
            pass
        for row, block_ids, overwrite in appends:
            tables.append_block_ids(row, block_ids, overwrite)

    prepared.stage(prepared.next_step())
    tables.apply_staged_writes()
    *_, slots = tables.step(*prepared.tensors[:3])
    prepared.check_slots(slots)
    benchmark.pedantic(tables.apply_staged_writes, setup=next_writes, rounds=STEPS)
