"""Commands that a source checkout carries out, in its bench/ folder: bench and record."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import fused_slots
from fused_slots.cli.progress import with_progress
from fused_slots.cli.result import Result, Status, check_writable
from fused_slots.faults import BackendUnavailableError

FOLDER = Path(fused_slots.__file__).parent.parent / "bench"


def run_bench(args: argparse.Namespace) -> Result:
    """Time the host paths and the CPU's operations; a wrong result is a finding."""
    if args.save:
        check_writable(args.save)
    result = _load(args.command, "run_benchmarks").run(args)
    assert isinstance(result, Result)
    return result


def run_record(args: argparse.Namespace) -> Result:
    """Record one scenario."""
    check_writable(args.file)
    schedule = _load(args.command, "recording.recorder").record(
        args.scenario,
        args.file,
        lambda steps, total: with_progress(args, steps, total, args.scenario),
    )
    document = {
        "file": str(args.file),
        "steps": len(schedule),
        "metadata": dict(schedule.metadata),
    }
    return Result(Status.GOOD, document, f"{args.file}: {len(schedule)} steps of {args.scenario}")


def _load(command: str, module: str) -> Any:
    """A module of the checkout's bench/ folder.

    Raises:
        BackendUnavailableError: the package is installed without one.
    """
    if not FOLDER.is_dir():
        raise BackendUnavailableError(
            command,
            expected="a source checkout with its bench/ folder",
            actual="no bench/ folder",
            hint="Run it in a checkout, as `make bench` does; the recordings that ship need none",
        )
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    return import_module(f"bench.{module}")
