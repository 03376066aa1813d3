"""The launch plans side by side on a GPU: python -m bench.cuda_plans --json FILE.

Slot mapping of every measured workload by token (the default), by request (the base case, grid
(group_count, num_reqs·tiles + 1)), and with one manager and one launch per group, as v1 runners do.
All three must give the same slots before they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.beside_vllm import filled_tables, permuted
from bench.cuda_timing import device_time
from fused_slots import AscendBlockTables
from tests.workloads import MEASURED, StepTensors, workload


@contextmanager
def plan(name: str) -> Iterator[None]:
    """FUSED_SLOTS_PLAN for the managers built inside."""
    os.environ["FUSED_SLOTS_PLAN"] = name
    try:
        yield
    finally:
        del os.environ["FUSED_SLOTS_PLAN"]


def per_group(managers: list[AscendBlockTables], arrays: StepTensors, count: int) -> None:
    for tables in managers:
        tables.compute_slot_mappings(*arrays[:3], count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name in MEASURED:
        load = workload(name)
        count = load.num_tokens
        sets = [permuted(load, seed) for seed in range(4)]
        by_token = filled_tables(load)
        with plan("by_request"):
            by_request = filled_tables(load)
        singles = []
        for g in range(len(load.groups)):
            alone = replace(load, groups=(load.groups[g],))
            alone.appends = [(row, (ids[g],), anew) for row, ids, anew in load.appends]
            singles.append(filled_tables(alone))
        expected = by_token.compute_slot_mappings(*sets[0][:3], count).clone()
        assert torch.equal(expected, by_request.compute_slot_mappings(*sets[0][:3], count))
        for g, tables in enumerate(singles):
            one = tables.compute_slot_mappings(*sets[0][:3], count)
            assert torch.equal(expected[g], one[0])
        times = {
            label: device_time([partial(call, arrays) for arrays in sets]).median
            for label, call in (
                ("by token", lambda a: by_token.compute_slot_mappings(*a[:3], count)),  # noqa: B023
                ("by request", lambda a: by_request.compute_slot_mappings(*a[:3], count)),  # noqa: B023
                ("a launch a group", lambda a: per_group(singles, a, count)),  # noqa: B023
            )
        }
        grids = [t.launch_plan(load.num_reqs, count).grid for t in (by_token, by_request)]
        results.append({"workload": name, "grids": grids, **times})
        print(name, grids, {label: round(value, 2) for label, value in times.items()}, flush=True)
    if options.json:
        card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps(card | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
