"""What `fused-slots bench` does: run the benchmarks of this folder and say their medians."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fused_slots.cli.json_file import read_json
from fused_slots.cli.progress import announce
from fused_slots.cli.result import Result, Status
from fused_slots.faults import BackendUnavailableError, ConfigurationError

_DONE = re.compile(r".*::bench_(.+?) (?:PASSED|FAILED|ERROR) *\[ *(\d+%)\]")
_USAGE_ERROR, _NOTHING_COLLECTED = 4, 5  # pytest's exit statuses
_SETTINGS = ("python_files=bench_*.py", "python_functions=bench_*", "filterwarnings=")
FOLDER = Path(__file__).parent


def run(args: argparse.Namespace) -> Result:
    """Run pytest-benchmark in a process of its own; a wrong result is a finding."""
    if find_spec("pytest_benchmark") is None:
        raise BackendUnavailableError(
            "bench",
            expected="pytest-benchmark installed",
            actual="no pytest-benchmark",
            hint="Run `make bench`, or pip install pytest-benchmark",
        )
    with tempfile.TemporaryDirectory() as scratch:
        save = args.save.resolve() if args.save else Path(scratch) / "bench.json"
        command = [sys.executable, "-m", "pytest", str(FOLDER), f"--benchmark-json={save}", "-v"]
        for setting in _SETTINGS:
            command += ["-o", setting]
        command += ["--benchmark-max-time=0.5", "--benchmark-min-rounds=20"]
        # CPU time of the process: what neighbours on the machine take is not counted.
        command += ["--benchmark-timer=time.process_time"]
        if args.select:
            command += ["-k", args.select]
        returncode, lines = _follow(args, command)
        measured = save.exists() and save.stat().st_size
        rows = _medians(read_json(save)) if measured else []
    document = {"good": returncode == 0, "saved": str(args.save or ""), "medians_us": rows}
    if returncode or not rows:
        output = "\n".join(lines)
        return Result(
            Status.FINDING,
            {**document, "good": False, "output": output},
            "\n".join(lines[-30:]),
        )
    table = [_line(row) for row in rows]
    if args.save:
        table.append(f"All measurements: {args.save}")
    return Result(Status.GOOD, document, "\n".join(table))


def _follow(args: argparse.Namespace, command: list[str]) -> tuple[int, list[str]]:
    """Run pytest and say which benchmark is done; its exit status and its lines.

    Raises:
        ConfigurationError: pytest finds no benchmark, or does not understand the selection.
    """
    lines = []
    with subprocess.Popen(
        command,
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line.rstrip("\n"))
            if done := _DONE.match(line):
                announce(args, f"bench: {done[1]} ({done[2]})")
    if run.returncode in (_USAGE_ERROR, _NOTHING_COLLECTED) and args.select:
        raise ConfigurationError(
            "--select",
            expected="a pytest -k expression that matches a benchmark",
            actual=repr(args.select),
        )
    return run.returncode, lines


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
