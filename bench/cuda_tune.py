"""Try the plan's constants on the measured workloads: python -m bench.cuda_tune (on a GPU).

Prints device time per choice, so that plan.py's constants are chosen by measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.beside_vllm import filled_tables, permuted
from bench.cuda_timing import device_time
from fused_slots import plan
from tests.workloads import MEASURED, workload

MAPPING = {"TILE": (32, 64, 128, 256), "MAP_WARPS": (1, 2, 4, 8)}
STEP = {"STEP_TILE": (128, 256), "ENTRIES": (8, 16), "COLUMNS": (32, 64), "STEP_WARPS": (4, 8)}


@contextmanager
def constants(**values: int) -> Iterator[None]:
    """plan.py with other constants."""
    before = {name: getattr(plan, name) for name in values}
    for name, value in values.items():
        setattr(plan, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(plan, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--what", choices=("mapping", "step", "both"), default="both")
    options = parser.parse_args()
    rows = []
    for name in MEASURED:
        load = workload(name)
        num_tokens = load.num_tokens
        sets = [permuted(load, seed) for seed in range(4)]
        if options.what != "step":
            for values in choices(MAPPING):
                with constants(**values):
                    tables = filled_tables(load)
                    map_slots = partial(tables.compute_slot_mappings, num_tokens_padded=num_tokens)
                    calls = [partial(map_slots, *arrays[:3]) for arrays in sets]
                    rows.append(["slots", name, values, device_time(calls).median])
        if options.what != "mapping":
            for values in choices(STEP):
                with constants(**values):
                    step = partial(filled_tables(load).step, num_tokens_padded=num_tokens)
                    whole = [partial(step, *arrays[:3]) for arrays in sets]
                    rows.append(["steady", name, values, device_time(whole[:1]).median])
                    rows.append(["whole", name, values, device_time(whole).median])
        for what in ("slots", "steady", "whole"):
            mine = sorted((row for row in rows if row[:2] == [what, name]), key=lambda row: row[3])
            if mine:
                best = ", ".join(f"{'/'.join(map(str, r[2].values()))} {r[3]:.2f}" for r in mine)
                print(f"{name:22s} {what:7s} {best}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))


def choices(options: dict[str, tuple[int, ...]]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


if __name__ == "__main__":
    main()
