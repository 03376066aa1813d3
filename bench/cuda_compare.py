"""Ours beside vLLM 0.33's own v2 BlockTables on one GPU: python -m bench.cuda_compare --json FILE.

Every measured workload, both sides checked to be equal first (beside_vllm.py). What is measured,
see cuda_timing.py:

- empty: a launch of our grid that does nothing;
- slots: compute_slot_mappings, four orders of the batch in turn;
- steady: gather + slots, the same batch again and again (ours in one `step`);
- whole: gather + slots, another order each time, so that every row is copied whole;
- host: the host's time for a whole step with its appends, and for compute_slot_mappings;
- profile: device time of such a step, its uploads included, and what was launched.

Over requests, groups and context: cuda_sweep.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton

from bench.beside_vllm import Comparison, line, machine
from bench.cuda_timing import Timing, device_time, profiled
from tests.workloads import MEASURED, workload


@triton.jit
def empty_kernel(pointer, size):
    """Nothing: what a launch of a grid costs."""


def empty_grid(comparison: Comparison) -> Timing:
    tables = comparison.ours.tables
    grid = tables.launch_plan(comparison.num_reqs, comparison.num_tokens).grid
    argument = torch.zeros(1, device="cuda")
    return device_time([partial(empty_kernel[grid], argument, 1, num_warps=8)])


def measure_device(comparison: Comparison) -> None:
    comparison.result["empty"] = asdict(empty_grid(comparison))
    comparison.measure_device()


def measure_host(comparison: Comparison) -> None:
    comparison.measure_host()
    comparison.measure_host_slots()


def profile(comparison: Comparison) -> None:
    sides = (comparison.ours, comparison.peer)
    mine, theirs = (profiled(comparison.moving_step(side)) for side in sides)
    ratio = round(theirs.device / max(mine.device, 1e-9), 2)
    result = {"ours": asdict(mine), "vllm": asdict(theirs), "ratio": ratio}
    comparison.result["profile"] = result


PARTS = {"device": measure_device, "host": measure_host, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", default=["device", "host"], choices=PARTS)
    options = parser.parse_args()
    results = []
    for name in MEASURED:
        comparison = Comparison(partial(workload, name), "cuda", workload=name)
        # The profiler slows every later launch of its process, so it comes in one of its own.
        for part in options.parts:
            PARTS[part](comparison)
        results.append(comparison.result)
        print(line(comparison.result), flush=True)
    if options.json:
        options.json.write_text(json.dumps(machine("cuda") | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
