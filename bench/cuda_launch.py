"""Host time of one launch on a CUDA GPU, by each way that the installed Triton offers.

    python bench/cuda_launch.py [--launches 2000] [--rounds 15]

`prepared` is what the package does; `own call` goes through Triton's launcher object, as with a
launcher that is not known. Both run the same kernels on the same batch and their results are
compared first. The host's clock, launches enqueued without waiting; median and quartiles over
rounds that take turns. Run it once for each release of Triton.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends import cuda

NUM_REQS, NUM_GROUPS, CONTEXT = 256, 6, 4096


@contextmanager
def launched_by(own_call: bool) -> Iterator[None]:
    """Managers that bind their kernels in here launch them this way."""
    prepared = cuda.prepared_call

    def chosen(run: Any, metadata: Any) -> cuda.PreparedCall:
        if own_call:
            return cuda.PreparedCall(run, (metadata, None, None, None), packed=False)
        return prepared(run, metadata)

    cuda.prepared_call = chosen
    try:
        yield
    finally:
        cuda.prepared_call = prepared


def make(own_call: bool) -> AscendBlockTables:
    """A warmed-up manager whose rows are long enough for the batch."""
    with launched_by(own_call):
        tables = AscendBlockTables.from_groups(
            [KVCacheGroup(16, CONTEXT // 16)] * NUM_GROUPS,
            max_num_reqs=NUM_REQS,
            max_num_batched_tokens=8192,
            device="cuda",
        )
        tables.warmup()
    for row in range(NUM_REQS):
        ids = list(range(1 + row, 1 + row + CONTEXT // 16))
        tables.append_block_ids(row, [ids] * NUM_GROUPS, overwrite=True)
    tables.apply_staged_writes()
    return tables


def calls(tables: AscendBlockTables) -> dict[str, Callable[[], Any]]:
    """A decode step's operations, and the bound launch below the first of them."""
    index = torch.arange(NUM_REQS, dtype=torch.int32, device="cuda")
    starts = torch.arange(NUM_REQS + 1, dtype=torch.int32, device="cuda")
    positions = torch.full((NUM_REQS,), CONTEXT - 1, dtype=torch.int64, device="cuda")
    return {
        "compute_slot_mappings": lambda: tables.compute_slot_mappings(
            index, starts, positions, NUM_REQS
        ),
        "step": lambda: tables.step(index, starts, positions),
        "map_tokens": lambda: tables.map_tokens(index, positions),
    }


def microseconds(call: Callable[[], Any], launches: int) -> float:
    """Host time of a call, enqueued so often without waiting."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(launches):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / launches * 1e6


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ways = {name: calls(make(own_call)) for name, own_call in
            (("prepared", False), ("own call", True))}  # fmt: skip
    print(f"triton {triton.__version__}, torch {torch.__version__}, "
          f"{torch.cuda.get_device_name()}, {NUM_REQS} decodes x {NUM_GROUPS} groups")  # fmt: skip
    for operation in ways["prepared"]:
        results = {way: each[operation]() for way, each in ways.items()}
        if torch.is_tensor(results["prepared"]):
            assert torch.equal(results["prepared"], results["own call"]), operation
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds + 1):
            for way, each in ways.items():
                times[way].append(microseconds(each[operation], arguments.launches))
        for way, taken in times.items():
            low, middle, high = statistics.quantiles(taken[1:], n=4)  # the first one warms up
            print(f"{operation:24} {way:9} {middle:6.2f} us  [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
