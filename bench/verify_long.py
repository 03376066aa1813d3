"""A million simulated steps against both oracles, in parts that can be resumed and shared.

    python bench/verify_long.py                         # CPU, then Triton's interpreter
    python bench/verify_long.py --backend cpu --minutes 15

Every part has its own seeds, so parts can run in any order: start the script several times to use
several cores, stop it at any time, start it again to go on. A part that other sources have
verified counts no longer. The sum of all finished parts goes to bench/results/verify_long.json.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import fused_slots  # noqa: E402
from tests.simulator import TARGETS, Report, SimulationError, simulate  # noqa: E402

RESULT = ROOT / "bench" / "results" / "verify_long.json"
PARTS = ROOT / "build" / "verify_long"
LIFE = 50
"""Steps of one configuration; the seed of a life is its number in the whole run."""

GOALS = {"cpu": 1_000_000, "cuda": 1_000_000, "npu": 1_000_000, "interpreter": 10_000}
STEPS_OF_PART = {"interpreter": 100}
SIZES = {"interpreter": "small"}


def sources() -> str:
    """A digest of what is verified and of what verifies it."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("fused_slots/**/*.py"), *ROOT.glob("tests/*.py")]):
        if not path.name.startswith(("test_", "mutants")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def verify_part(backend: str, part: int, steps: int) -> dict[str, Any]:
    """One part's lives, with consecutive seeds; a life that fails is listed, the rest goes on."""
    report, failures, started = Report(), [], time.perf_counter()
    lives = steps // LIFE
    for seed in range(part * lives, (part + 1) * lives):
        try:
            report.add(simulate(TARGETS[backend], seed, LIFE, SIZES.get(backend, "normal")))
        except SimulationError as error:
            failures.append(str(error))
    return {
        "steps": report.steps,
        "failures": failures,
        "digest": report.digest,
        "seconds": round(time.perf_counter() - started, 1),
        "slots_owned_once": report.tokens_owned,
        "arrays_compared": sum(report.compared.values()),
        "events": dict(sorted(report.events.items())),
        "sources": sources(),
    }


def finished(path: Path, current: str) -> dict[str, Any] | None:
    """A part's result, if these sources gave it."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["sources"] == current else None


def run_parts(backend: str, num_parts: int, steps: int, deadline: float) -> None:
    """Do every part that is neither finished nor in another process's hands."""
    current = sources()
    PARTS.mkdir(parents=True, exist_ok=True)
    for part in range(num_parts):
        path = PARTS / f"{backend}-{steps}-{part:05}.json"
        if time.monotonic() > deadline or finished(path, current):
            continue
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if finished(path, current):
                continue
            result = verify_part(backend, part, steps)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result))
            partial.replace(path)
        print(
            f"{backend} part {part + 1} of {num_parts}: {result['steps']} steps, "
            f"{len(result['failures'])} failures, {result['seconds']} s",
            flush=True,
        )


def summarise(backend: str, num_parts: int, steps: int, goal: int) -> dict[str, Any]:
    """The sum of all parts that these sources have finished, in order of their numbers."""
    current, digest = sources(), hashlib.sha256()
    paths = [PARTS / f"{backend}-{steps}-{part:05}.json" for part in range(num_parts)]
    parts = [result for path in paths if (result := finished(path, current))]
    events: dict[str, int] = {}
    for result in parts:
        digest.update(result["digest"].encode())
        for name, count in result["events"].items():
            events[name] = events.get(name, 0) + count
    return {
        "steps": sum(result["steps"] for result in parts),
        "goal": goal,
        "mismatches": sum(len(result["failures"]) for result in parts),
        "failures": [failure for result in parts for failure in result["failures"]],
        "digest": digest.hexdigest(),
        "seconds": round(sum(result["seconds"] for result in parts), 1),
        "slots_owned_once": sum(result["slots_owned_once"] for result in parts),
        "arrays_compared": sum(result["arrays_compared"] for result in parts),
        "events": dict(sorted(events.items())),
        "version": fused_slots.__version__,
        "sources": current,
        "size": SIZES.get(backend, "normal"),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def verify(backend: str, goal: int, minutes: float) -> int:
    """Run what is left of one backend's parts and write the sum; 1 after a mismatch."""
    steps = STEPS_OF_PART.get(backend, 5_000)
    num_parts = -(-goal // steps)
    run_parts(backend, num_parts, steps, time.monotonic() + 60 * minutes)
    summary = summarise(backend, num_parts, steps, goal)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results[backend] = summary
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n")
    print(
        f"{backend}: {summary['steps']:,} of {goal:,} steps, {summary['mismatches']} mismatches, "
        f"{summary['seconds']} s, digest {summary['digest']}"
    )
    print("\n".join(summary["failures"]))
    return int(summary["mismatches"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", choices=sorted(GOALS), help="default: cpu and interpreter")
    parser.add_argument("--steps", type=int, help="in all; default: the backend's goal")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no part after these")
    options = parser.parse_args()
    if options.backend:
        goal = options.steps or GOALS[options.backend]
        return verify(options.backend, goal, options.minutes)
    status = verify("cpu", options.steps or GOALS["cpu"], options.minutes)
    if find_spec("triton") is None:
        print("interpreter: not run, triton is not installed")
        return status
    again = [sys.executable, __file__, "--backend", "interpreter", "--minutes", options.minutes]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(list(map(str, again)), env=environment, check=False)
    return max(status, done.returncode)


if __name__ == "__main__":
    sys.exit(main())
