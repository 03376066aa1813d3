"""One side of `bench.regress --gpu`: device and host medians of every workload, on a GPU.

python -m bench.regress_gpu --json FILE [--select 256x6] [--only NAME ...] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.beside_vllm import Ours, permuted
from bench.cuda_timing import clock_time, device_time, host_time
from tests.workloads import MEASURED, workload

STEPS = 330


def calls(name: str, device: str) -> dict[str, tuple[bool, list[Callable[[], Any]]]]:
    """By name: whether the host's time counts, and the calls of one measurement."""
    load = workload(name)
    side, tokens = Ours(load, device), load.num_tokens
    sets = [permuted(load, seed, device) for seed in range(4)]
    step = side.gather_and_slots
    schedule = iter([list(load.next_step()) for _ in range(STEPS)])

    def moving_step() -> None:
        for row, ids, overwrite in next(schedule):
            side.tables.append_block_ids(row, ids, overwrite=overwrite)
        step(sets[0], tokens)

    return {
        "slots": (False, [partial(side.slots, arrays, tokens) for arrays in sets]),
        "steady step": (False, [partial(step, sets[0], tokens)]),
        "whole step": (False, [partial(step, arrays, tokens) for arrays in sets]),
        "host slots": (True, [partial(side.slots, sets[0], tokens)]),
        "host step with its appends": (True, [moving_step]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--select", default="", help="part of a workload's name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of measurements")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    options = parser.parse_args()
    medians = {}
    only = options.only
    for name in [name for name in MEASURED if options.select in name]:
        if only and not any(each.endswith(f" [{name}]") for each in only):
            continue
        for what, (on_host, each) in calls(name, options.device).items():
            measurement = f"{what} [{name}]"
            if only and measurement not in only:
                continue
            if options.device == "cpu":
                timing = clock_time(each)
            else:
                timing = host_time(each[0]) if on_host else device_time(each)
            medians[measurement] = timing.median
    options.json.write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
