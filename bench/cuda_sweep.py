"""Ours beside vLLM's BlockTables over requests, groups and context, on one GPU.

    VLLM_WHEEL=<unpacked wheel> python -m bench.cuda_sweep --json bench/results/cuda_sweep.json
    python -m bench.cuda_sweep --device cpu --requests 1 4 --groups 1 --contexts  # a dry run

Decode steps. Device time of slots, of the step with an unchanged batch (steady) and with every row
copied whole; over requests and groups also the host's time for whole steps with their appends.
sweep_pictures.py draws the result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.beside_vllm import Comparison, line, machine
from fused_slots import KVCacheGroup
from tests.workloads import HEADROOM, SIX, Workload, workload

REQUESTS = (1, 4, 16, 64, 256, 1024, 4096)
GROUPS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (8192, 32768, 131072, 1048576)
FIXED_GROUPS, FIXED_REQUESTS, FIXED_CONTEXT = 6, 64, 8192
BY_CONTEXT = ((256, 6), (64, 12))
"""Requests and groups of the workloads whose context is swept."""


def decode(requests: int, groups: int, context: int = FIXED_CONTEXT) -> Workload:
    """A decode step of so many requests and groups, block sizes 16 to 256."""
    below = np.random.default_rng(requests).integers(0, 256, requests)
    contexts = (context - below).tolist()
    longest = max(contexts) + HEADROOM
    sizes = [SIX[g % len(SIX)] for g in range(groups)]
    return Workload(
        f"decode {requests}x{groups}",
        tuple(KVCacheGroup(size, -(-longest // size)) for size in sizes),
        query_lens=[1] * requests,
        contexts=contexts,
        max_num_reqs=requests,
        max_num_batched_tokens=max(8192, requests),
    )


Point = tuple[int, int, int, Callable[[], Workload]]
"""Requests, groups, context and the workload."""


def points(options: argparse.Namespace) -> Iterator[tuple[str, list[Point]]]:
    """Every sweep with its points."""
    yield (
        "requests",
        [
            (n, FIXED_GROUPS, FIXED_CONTEXT, partial(decode, n, FIXED_GROUPS))
            for n in options.requests
        ],
    )
    yield (
        "groups",
        [
            (FIXED_REQUESTS, n, FIXED_CONTEXT, partial(decode, FIXED_REQUESTS, n))
            for n in options.groups
        ],
    )
    yield (
        "context",
        [
            (requests, groups, context, partial(workload, f"decode {requests}x{groups}", context))
            for requests, groups in BY_CONTEXT
            for context in options.contexts
        ],
    )


def sweep(name: str, swept: list[Point], device: str) -> list[dict[str, Any]]:
    results = []
    for requests, groups, context, make_load in swept:
        labels = {"requests": requests, "groups": groups, "context": context}
        comparison = Comparison(make_load, device, **labels)
        comparison.measure_device()
        if name != "context":
            comparison.measure_host()
        results.append(comparison.result)
        print(f"{name:8s} {line(comparison.result)}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--requests", type=int, nargs="*", default=REQUESTS)
    parser.add_argument("--groups", type=int, nargs="*", default=GROUPS)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    options = parser.parse_args()
    begin, sweeps = time.perf_counter(), {}
    for name, swept in points(options):
        sweeps[name] = sweep(name, swept, options.device)
        seconds = round(time.perf_counter() - begin, 1)
        print(f"{seconds} s", flush=True)
        if options.json:
            # After each sweep, so that a run that is cut short keeps the finished ones.
            report = machine(options.device) | {"seconds": seconds, "sweeps": sweeps}
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
