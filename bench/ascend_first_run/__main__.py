"""Runs the parts one after another, each in a process of its own; see the package."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path("ascend_first_run.json")
ROOT = Path(__file__).parents[2]
LOG_CHARACTERS = 4000
KILLED_S = 10
BAD = ("wrong", "failed", "crashed", "timed out", "interrupted")
"""Ends of a part that make the exit status 1; the others are "ok" and "needs an NPU"."""

# Names and limits alone: what parts import may be what hangs.
LIMITS = {
    "machine": 300, "words": 90, "lines": 90, "cache": 60, "events": 90, "modes": 60,
    "lives": 300, "graphs": 120, "dealing": 60, "latencies": 120, "kernels": 300, "public": 240,
    "profiler": 240, "random": 720,
}  # fmt: skip
"""Seconds that each part may take, in the order in which they run; less than an hour in all."""


@dataclass(frozen=True)
class Options:
    """Of a run; a part's process gets the same."""

    device: str
    quick: bool
    rehearse: str
    scale: float


def run_part(name: str, options: Options, folder: Path) -> dict[str, Any]:
    """One part's end, seconds, result and log."""
    found, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [
        *(sys.executable, "-m", "bench.ascend_first_run", "part", name, str(found)),
        *("--device", options.device, "--rehearse", options.rehearse),
        *(["--quick"] if options.quick else []),
    ]
    begin, status, code = time.monotonic(), "", None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            code = process.wait(LIMITS[name] * options.scale)
        except subprocess.TimeoutExpired:
            status = "timed out"
        except KeyboardInterrupt:
            status = "interrupted"
    if status:
        status += end(process)
    written = json.loads(found.read_text()) if found.exists() else {}
    status = status or written.get("status", "")
    if not status:
        status = "crashed"
        written["error"] = f"the process ended with {code}"
    entry = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
    entry |= {key: written[key] for key in ("result", "error") if key in written}
    if status.startswith(BAD):
        entry["log"] = log.read_text(errors="replace")[-LOG_CHARACTERS:]
    return entry


def end(process: subprocess.Popen[bytes]) -> str:
    """Kill a part and all that it started; what to add to its status where that fails."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:  # in a driver's call that does not return
        return ", and could not be killed"
    return ""


def do_part(name: str, found: Path, options: Options) -> None:
    """In the part's own process: run it and keep writing down what it has found."""
    written: dict[str, Any] = {}

    def write(**entries: Any) -> None:
        written.update(entries)
        partial = found.with_suffix(".new")
        partial.write_text(json.dumps(written))
        partial.replace(found)

    from bench.ascend_first_run.note import Wrong

    try:
        device_class = importlib.import_module("bench.ascend_first_run.device").Device
        if options.rehearse:
            device_class = importlib.import_module(options.rehearse).device_class(name)
        from bench.ascend_first_run.device import NeedsAnNpu
        from bench.ascend_first_run.parts import PARTS

        device = device_class(options.device, options.quick)
        try:
            result = PARTS[name](device, lambda result: write(result=result))
        except NeedsAnNpu:
            write(status="needs an NPU")
        else:
            device.synchronize()
            write(status="ok", result=result)
    except Wrong as wrong:
        write(status="wrong", result=wrong.found)
    except Exception as error:
        traceback.print_exc()
        write(status="failed", error=f"{type(error).__name__}: {error}")


def run_all(options: Options, names: list[str], path: Path, goes_on: bool) -> int:
    """Run parts, writing the result file after each; 1 if one of them went wrong."""
    result: dict[str, Any] = {"format": 2, "device": options.device, "parts": {}}
    if goes_on and path.exists():
        result = json.loads(path.read_text())
    parts = result["parts"]
    names = [name for name in names if parts.get(name, {}).get("status") != "ok"]
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names, start=1):
            print(
                f"[{number}/{len(names)}] {name}, {LIMITS[name]} s at most ... ", end="", flush=True
            )
            entry = parts[name] = run_part(name, options, Path(folder))
            print(f"{entry['status']}, {entry['seconds']} s {entry.get('error', '')}", flush=True)
            partial = path.with_suffix(".new")
            partial.write_text(json.dumps(result, indent=1) + "\n")
            partial.replace(path)
            if entry["status"].startswith("interrupted"):
                print(f"The rest: python -m bench.ascend_first_run --continue --json {path}")
                return 130
    print(f"Written to {path}. Next: python -m bench.ascend_first_run send --json {path}")
    return int(any(parts[name]["status"].startswith(BAD) for name in names))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ascend_first_run")
    parser.add_argument("command", nargs="?", default="run",
                        choices=("run", "send", "tables", "part"))  # fmt: skip
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="npu:0")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, a little of each part")
    parser.add_argument("--only", action="append", choices=list(LIMITS), help="these parts alone")
    parser.add_argument("--continue", dest="goes_on", action="store_true",
                        help="leave out parts that were ok in the result file")  # fmt: skip
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--quick", action="store_true", help="a little of each part")
    parser.add_argument("--rehearse", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time limits")
    chosen = parser.parse_args(arguments)
    device = "cpu" if chosen.dry_run else chosen.device
    options = Options(device, chosen.quick or chosen.dry_run, chosen.rehearse, chosen.scale)
    if chosen.command == "part":
        do_part(chosen.part[0], Path(chosen.part[1]), options)
        return 0
    if chosen.command == "run":
        return run_all(options, chosen.only or list(LIMITS), chosen.json, chosen.goes_on)
    from bench.ascend_first_run import report

    if not chosen.json.exists():
        print(f"{chosen.json} is not there; python -m bench.ascend_first_run makes it")
        return 2
    result = json.loads(chosen.json.read_text())
    print(report.tables(result) if chosen.command == "tables" else report.send(result, chosen.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
