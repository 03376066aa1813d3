"""Every kernel variant compiled for every Ascend target and executed on random batches, on a CPU.

    .venv-ascend/bin/python bench/verify_ascend.py                       # hours
    .venv-ascend/bin/python bench/verify_ascend.py --target Ascend910B3 --cases 20

Each variant is a part: it is compiled, its cost is held against the rules, and so many batches
are executed and compared with the oracles. Parts that the same sources have finished with as many
cases are not repeated, so the script can be stopped and started again. The sum goes to
bench/results/verify_ascend.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ascend")]

RESULT = ROOT / "bench" / "results" / "verify_ascend.json"
PARTS = ROOT / "build" / "verify_ascend"
TARGETS = ("Ascend910B3", "Ascend950PR_9589")
CASES = 200
UB_GOAL = 96 * 1024


SOURCES = (
    "kernels/ascend/*.py",
    "kernels/common.py",
    "kernels/layout.py",
    "backends/ascend/*.py",
    "backends/base.py",
    "backends/descriptor.py",
    "backends/launch.py",
    "backends/device.py",
    "reference.py",
)
"""Of the package, what decides what a device would run and what is expected of it."""


def sources() -> str:
    """A digest of what is verified and of what verifies it."""
    digest = hashlib.sha256()
    package = [path for pattern in SOURCES for path in ROOT.glob(f"fused_slots/{pattern}")]
    for path in sorted([*package, *ROOT.glob("tests/ascend/**/*.py")]):
        if not path.name.startswith(("test_", "conftest")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def part_path(target: str, variant: str, cases: int) -> Path:
    return PARTS / f"{target}-{variant}-{cases}-{sources()}.json"


def verify_part(target: str, kind: str, number: int, cases: int) -> dict[str, Any]:
    """One variant, by its number under its kind: its cost, its cases, and why one failed."""
    from all_variants import KINDS, variants_by_kind
    from checked import CheckedVariant

    variant = variants_by_kind()[kind][number]
    started, failure = time.perf_counter(), None
    checked = CheckedVariant(KINDS[kind], target, variant)
    try:
        checked.run(cases)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    backend = checked.tables._backend
    backend._bound(variant)
    result = {
        "target": target,
        "variant": str(variant),
        "cases": checked.cases,
        "failure": failure,
        "seconds": round(time.perf_counter() - started, 1),
        "cost": backend.launcher.kernels[variant].cost.as_dict(),  # type: ignore[attr-defined]
    }
    path = part_path(target, str(variant), cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return result


def summarise(results: list[dict[str, Any]], num_variants: int) -> dict[str, Any]:
    """The sum over one target's finished variants; what breaks a rule is listed."""
    costs = [result["cost"] for result in results]
    return {
        "variants": num_variants,
        "finished": len(results),
        "cases": sum(result["cases"] for result in results),
        "fewest_cases_of_a_variant": min((result["cases"] for result in results), default=0),
        "failures": [
            f"{result['variant']}, case {result['cases']}: {result['failure']}"
            for result in results
            if result["failure"]
        ],
        "ub_bytes_at_most": max((cost["ub_bytes"] for cost in costs), default=0),
        "scalar_loops_at_most": max((cost["scalar_loops"] for cost in costs), default=0),
        "locks": sum(cost["locks"] for cost in costs),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "sources": sources(),
    }


def verify(target: str, cases: int, minutes: float, processes: int) -> int:
    """Run what is left of one target's variants and write the sum; 1 if a rule is broken."""
    from all_variants import pairwise, variants_by_kind

    deadline = time.monotonic() + 60 * minutes
    results: list[dict[str, Any]] = []
    waiting: list[tuple[str, str, int, int]] = []
    pairs = pairwise(v for variants in variants_by_kind().values() for v in variants)
    for kind, variants in variants_by_kind().items():
        for number, variant in enumerate(variants):
            path = part_path(target, str(variant), cases)
            if path.exists():
                results.append(json.loads(path.read_text()))
            else:
                # First those that cover most.
                waiting.insert(0 if variant in pairs else len(waiting),
                               (target, kind, number, cases))  # fmt: skip
    num_variants = len(results) + len(waiting)
    with ProcessPoolExecutor(processes) as pool:
        running = {}
        while (waiting and time.monotonic() < deadline) or running:
            while waiting and len(running) < processes and time.monotonic() < deadline:
                part = waiting.pop(0)
                running[pool.submit(verify_part, *part)] = part
            done = next(as_completed(running))
            del running[done]
            results.append(done.result())
            last = results[-1]
            print(f"{len(results)} of {num_variants}: {last['variant']} for {target}, "
                  f"{last['cases']} cases, {last['failure'] or 'exact'}, "
                  f"{last['seconds']} s", flush=True)  # fmt: skip
    summary = summarise(results, num_variants)
    recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    recorded[target] = summary
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(recorded, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    broken = summary["failures"] or summary["locks"] or summary["scalar_loops_at_most"]
    return int(bool(broken) or summary["ub_bytes_at_most"] > UB_GOAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="default: both")
    parser.add_argument("--cases", type=int, default=CASES, help="of each variant")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no variant after these")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    targets = [options.target] if options.target else TARGETS
    return max(
        verify(target, options.cases, options.minutes, options.processes) for target in targets
    )


if __name__ == "__main__":
    sys.exit(main())
