"""A long life of one manager after another, every step checked, nothing growing.

    python -m bench.soak --device cpu --steps 1000000 --processes 2 --json FILE
    python -m bench.soak --device cuda --steps 1000000 --processes 8 --minutes 8 --json FILE

Each process keeps a manager of every world (soak_plan.py) alive and gives them steps in turns, in
chunks of 1,000. Whatever a step writes (slots with their padded tail, gathered tables with all
their rows, drafts, dummies, the caller's own tables) is compared on the device with an oracle of
plain torch operations (soak_oracle.py); the counters of differences and the manager's faults are
read after each chunk. Memory, objects, compiled kernels and synchronisations are recorded there as
well, and the run fails if one of them has grown since the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.soak_manager import Mismatch, Soaked
from bench.soak_plan import WORLDS
from fused_slots import AscendBlockTables, env
from fused_slots.backends.gpu import KEPT_PLANS
from fused_slots.cli.json_file import read_json
from fused_slots.host.rows import host_half
from fused_slots.plan import TokenPlan
from tests.memory import kept_by, resident_kib

CHUNK = 1000
KEPT_RECORDS = 40
GROWTH_ALLOWED = {
    "rss_kib": 16 * 1024,
    "objects": 200,
    "torch_kib": 1024,
    "compiled": 0,
    "kept": 200,
}
"""By how much the most of each record after the first tenth may exceed the most in it."""

GROWTH_ALLOWED_ON_GPU = GROWTH_ALLOWED | {"objects": 600, "kept": 600}
"""There each of the 32 places of the uploads' ring grows until it has had its largest packet: in
41,000 steps of three managers by some 300 entries and objects."""


@dataclass(frozen=True)
class Record:
    """What must not grow, and the time of a step, after a round of chunks."""

    steps: int
    rss_kib: int
    objects: int
    """Objects that the collector follows, without these records and token plans."""
    torch_kib: int
    compiled: int
    kept: int
    """Entries of containers that managers keep between calls, token plans apart."""
    token_plans: int
    """Token plans kept by sizes; each manager keeps `KEPT_PLANS`."""
    synchronisations: int
    cpu_us_per_step: float

    @classmethod
    def of(
        cls,
        soaked: list[Soaked],
        num_records: int,
        synchronisations: int,
        cpu_us_per_step: float,
    ) -> Record:
        gc.collect()
        managers = [world.tables for world in soaked]
        kept = kept_by(*managers)
        plans = [t._backend._plan_tokens for t in managers if hasattr(t._backend, "_plan_tokens")]
        objects_of_plans = gc.get_referents(*plans)
        objects_of_plans += [vars(plan) for plan in objects_of_plans if type(plan) is TokenPlan]
        on_gpu = soaked[0].device.type == "cuda"
        allocated = torch.cuda.memory_allocated() if on_gpu else kept.tensor_bytes
        return cls(
            sum(world.steps for world in soaked),
            resident_kib(),
            len(gc.get_objects()) - num_records - sum(map(gc.is_tracked, objects_of_plans)),
            allocated // 1024,
            sum(compiled_kernels(tables) for tables in managers),
            kept.entries,
            sum(cache.cache_info().currsize for cache in plans),
            synchronisations,
            round(cpu_us_per_step, 1),
        )


def growth_allowed(device: str) -> dict[str, int]:
    return GROWTH_ALLOWED_ON_GPU if device == "cuda" else GROWTH_ALLOWED


def compiled_kernels(tables: AscendBlockTables) -> int:
    launcher = getattr(tables._backend, "launcher", None)
    return launcher.compiled if launcher else 0


def soak(device: str, steps: int, seed: int, minutes: float) -> dict[str, Any]:
    """Soak one process; stops at the first mismatch, or when the minutes are over."""
    started, failures, records, done = time.monotonic(), [], [], 0
    synchronised: Counter[str] = Counter()
    soaked = [Soaked(world, 1000 * seed + n, device) for n, world in enumerate(WORLDS)]
    try:
        while done < steps and time.monotonic() - started < 60 * minutes:
            synchronisations: list[str] = []
            begun, before = time.process_time(), done
            for world in soaked:
                count = min(CHUNK, steps - done)
                synchronisations += world.run(count)
                done += count
            each = (time.process_time() - begun) * 1e6 / (done - before)
            records.append(Record.of(soaked, len(records), len(synchronisations), each))
            synchronised.update(synchronisations)
    except Mismatch as error:
        failures.append(f"seed {seed}: {error}")
    growth = grown(records)
    failures += [
        f"seed {seed}: {name} grew by {growth[name]} after the first tenth"
        for name, allowed in growth_allowed(device).items()
        if growth.get(name, 0) > allowed
    ]
    plans = max((record.token_plans for record in records), default=0)
    if plans > KEPT_PLANS * len(soaked):
        failures.append(f"seed {seed}: {plans} token plans are kept by {len(soaked)} managers")
    if synchronised:
        failures.append(f"seed {seed}: steps waited for the device: {dict(synchronised)}")
    every = max(-(-len(records) // KEPT_RECORDS), 1)
    return {
        "seed": seed,
        "steps": sum(world.steps for world in soaked),
        "seconds": round(time.monotonic() - started, 1),
        "failures": failures,
        "cells_compared": sum(world.compared for world in soaked),
        "kinds": dict(sum((world.kinds for world in soaked), Counter())),
        "faults_as_expected": dict(sum((world.faults for world in soaked), Counter())),
        "growth_after_first_tenth": growth,
        "records": [asdict(record) for record in records[::every]],
    }


def grown(records: list[Record]) -> dict[str, float]:
    """By how much the most after the first tenth exceeds the most in it; and the time of a step."""
    tenth = max(len(records) // 10, 1)
    first, rest = records[:tenth], records[tenth:]
    if not rest:
        return {}
    growth: dict[str, float] = {
        name: max(getattr(record, name) for record in rest)
        - max(getattr(record, name) for record in first)
        for name in GROWTH_ALLOWED
    }
    means = [
        sum(record.cpu_us_per_step for record in part) / len(part)
        for part in (first, records[-tenth:])
    ]
    return growth | {"last_tenth_over_first_time": round(means[1] / means[0], 3)}


def in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Several processes side by side, each with its seed and its part of the steps.

    On a machine of several GPUs they take them in turns.
    """
    count, on_gpu = options.processes, options.device == "cuda"
    gpus = torch.cuda.device_count() if on_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.json" for n in range(count)]
        running = []
        for n, path in enumerate(paths):
            steps = options.steps * (n + 1) // count - options.steps * n // count
            arguments = ["--device", options.device, "--steps", steps, "--seed", options.seed + n]
            arguments += ["--minutes", options.minutes, "--json", path]
            command = [sys.executable, "-m", "bench.soak", *map(str, arguments)]
            one_gpu = {"CUDA_VISIBLE_DEVICES": str(n % gpus)} if on_gpu else {}
            running.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | one_gpu)
            )
        for process in running:
            process.wait()
        reports = []
        for n, path in enumerate(paths):
            if path.exists():
                reports += read_json(path)["processes"]
            else:
                died = f"seed {options.seed + n}: the process ended without a result"
                reports.append({"steps": 0, "failures": [died]})
        return reports


def summary(options: argparse.Namespace, reports: list[dict[str, Any]]) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "backend": env.BACKEND.read() or options.device,
        "host": host_half(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "worlds": [world.name for world in WORLDS],
        "steps": sum(report["steps"] for report in reports),
        "failures": [failure for report in reports for failure in report["failures"]],
        "allowed": growth_allowed(options.device),
        "processes": reports,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=1_000_000, help="in all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no chunk after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=Path, help="result of a run with other seeds to add up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = read_json(options.after)["processes"] if options.after else []
    if options.processes > 1:
        reports = in_processes(options)
    else:
        reports = [soak(options.device, options.steps, options.seed, options.minutes)]
    result = summary(options, before + reports)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['steps']:,} steps, {len(result['failures'])} failures", flush=True)
    print(*result["failures"], sep="\n")
    return int(bool(result["failures"]) or not result["steps"])


if __name__ == "__main__":
    sys.exit(main())
