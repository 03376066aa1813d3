"""The bench command: run the benchmarks of a source checkout and print their medians."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fused_slots
from fused_slots.cli.result import Result, Status
from fused_slots.faults import BackendUnavailableError

_SETTINGS = ("python_files=bench_*.py", "python_functions=bench_*", "filterwarnings=")
FOLDER = Path(fused_slots.__file__).parent.parent / "bench"


def run_bench(args: argparse.Namespace) -> Result:
    """Run pytest-benchmark in a process of its own; a wrong result is a finding."""
    if not FOLDER.is_dir() or find_spec("pytest_benchmark") is None:
        raise BackendUnavailableError(
            "bench",
            expected="a source checkout with its bench/ folder, and pytest-benchmark",
            actual="no bench/ folder" if not FOLDER.is_dir() else "no pytest-benchmark",
            hint="Run `make bench` in a checkout, or pip install 'fused-slots[bench]' there",
        )
    with tempfile.TemporaryDirectory() as scratch:
        save = args.save.resolve() if args.save else Path(scratch) / "bench.json"
        save.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", str(FOLDER), f"--benchmark-json={save}", "-q"]
        for setting in _SETTINGS:
            command += ["-o", setting]
        command += ["--benchmark-max-time=0.5", "--benchmark-min-rounds=20"]
        # CPU time of the process: what neighbours on the machine take is not counted.
        command += ["--benchmark-timer=time.process_time"]
        if args.select:
            command += ["-k", args.select]
        run = subprocess.run(
            command, cwd=FOLDER.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        content = save.read_text() if save.exists() else ""
    rows = _medians(json.loads(content)) if content else []
    document = {"good": run.returncode == 0, "saved": str(args.save or ""), "medians_us": rows}
    if run.returncode or not rows:
        tail = "\n".join(run.stdout.splitlines()[-30:])
        return Result(Status.FINDING, {**document, "good": False, "output": run.stdout}, tail)
    lines = [_line(row) for row in rows]
    if args.save:
        lines.append(f"All measurements: {args.save}")
    return Result(Status.GOOD, document, "\n".join(lines))


def _medians(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": entry["name"].removeprefix("bench_"),
            "median_us": round(entry["stats"]["median"] * 1e6, 2),
            "rounds": entry["stats"]["rounds"],
            **{key: round(value, 2) for key, value in entry["extra_info"].items()},
        }
        for entry in document["benchmarks"]
    ]


def _line(row: dict[str, Any]) -> str:
    text = f"{row['name']:<64}{row['median_us']:>12,.1f} us"
    if "ours_over_peer" in row:
        text += (
            f"   in turns {row['ours_us']:,.1f} and the peer's {row['peer_us']:,.1f} us: "
            f"{row['ours_over_peer']:.2f}"
        )
    return text
