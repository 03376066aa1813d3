"""Commands on recorded schedules: demo, replay, check, record."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fused_slots import env
from fused_slots.cli.result import (
    Commands,
    Result,
    Status,
    add_command,
    add_context_parallel,
    context_parallel,
)
from fused_slots.inspect import demo
from fused_slots.inspect.replay import Replay
from fused_slots.inspect.schedule import (
    Schedule,
    list_recordings,
    load_recording,
    load_schedule,
)
from fused_slots.inspect.schedule_arrays import ScheduleError
from fused_slots.inspect.schedule_check import check_schedule
from fused_slots.vllm.scheduler_recording import record
from fused_slots.vllm.scheduler_scenarios import SCENARIOS

MAX_FINDINGS = 20
"""Findings printed in full."""


def add_commands(commands: Commands) -> None:
    """Add demo, replay, check and record."""
    parser = add_command(
        commands, "demo", run_demo, "replay a shipped recording, check every slot, draw the tables"
    )
    parser.add_argument(
        "--recording",
        default=demo.DEFAULT_RECORDING,
        choices=[*list_recordings(), "all"],
        help=f"recording to replay (default: {demo.DEFAULT_RECORDING})",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), help="folder for pictures (default: this one)"
    )
    parser.add_argument("--format", choices=["png", "svg"], default="png", help="of the pictures")
    parser.add_argument("--no-picture", action="store_true", help="draw nothing")
    _add_replay_options(parser)
    parser = add_command(commands, "replay", run_replay, "replay a schedule file and check it")
    parser.add_argument("file", type=Path, help="schedule file, or the name of a recording")
    parser.add_argument("--picture", type=Path, help="draw the tables to this .png or .svg file")
    _add_replay_options(parser)
    parser = add_command(
        commands, "check", run_check, "check a schedule file: format, capacity, truth, aliasing"
    )
    parser.add_argument("file", type=Path, help="schedule file")
    parser = add_command(
        commands, "record", run_record, "record a schedule from vLLM's own scheduler (needs vllm)"
    )
    parser.add_argument(
        "scenario", choices=[scenario.name for scenario in SCENARIOS], help="what to record"
    )
    parser.add_argument("file", type=Path, help="schedule file to write (.npz.xz)")


def run_demo(args: argparse.Namespace) -> Result:
    """Replay one recording or all of them."""
    names = list_recordings() if args.recording == "all" else (args.recording,)
    reports = []
    for name in names:
        picture = None if args.no_picture else args.output / f"block_tables_{name}.{args.format}"
        reports.append(_replay(args, load_recording(name), picture, demo.GRAPH_BATCH))
    good = all(report.good for report in reports)
    documents = [report.document() for report in reports]
    return Result(
        Status.GOOD if good else Status.FINDING,
        {"good": good, "replays": documents},
        "\n\n".join(report.text() for report in reports),
    )


def run_replay(args: argparse.Namespace) -> Result:
    """Replay one file."""
    name = str(args.file)
    is_recording = name in list_recordings() and not args.file.exists()
    schedule = load_recording(name) if is_recording else load_schedule(args.file)
    report = _replay(args, schedule, args.picture, args.pad_requests_to)
    status = Status.GOOD if report.good else Status.FINDING
    return Result(status, {"good": report.good, **report.document()}, report.text())


def run_check(args: argparse.Namespace) -> Result:
    """Check one file."""
    steps = 0
    try:
        schedule = load_schedule(args.file)
        steps = len(schedule)
        findings = list(check_schedule(schedule))
    except ScheduleError as error:
        findings = [str(error)]
    document = {"file": str(args.file), "good": not findings, "steps": steps, "findings": findings}
    if not findings:
        text = f"{args.file}: {steps} steps, no finding"
        return Result(Status.GOOD, document, text)
    lines = [f"{args.file}: {len(findings)} findings", *findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"... and {len(findings) - MAX_FINDINGS} more")
    return Result(Status.FINDING, document, "\n".join(lines))


def run_record(args: argparse.Namespace) -> Result:
    """Record one scenario."""
    schedule = record(args.scenario, args.file)
    document: dict[str, Any] = {
        "file": str(args.file),
        "steps": len(schedule),
        "metadata": dict(schedule.metadata),
    }
    return Result(Status.GOOD, document, f"{args.file}: {len(schedule)} steps of {args.scenario}")


def _add_replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:i] or npu[:i]")
    parser.add_argument(
        "--backend",
        choices=[choice for choice in env.BACKEND.choices if choice],
        help=f"instead of the device's own ({env.BACKEND.name})",
    )
    parser.add_argument(
        "--replay-window", type=int, default=0, help="tokens replayed after each prefix hit"
    )
    parser.add_argument(
        "--pad-requests-to",
        type=int,
        default=None,
        help="fill batches with dummies to a multiple of this "
        f"(default: {demo.GRAPH_BATCH} in demo, 1 in replay)",
    )
    add_context_parallel(parser)


def _replay(
    args: argparse.Namespace, schedule: Schedule, picture: Path | None, pad_requests_to: int | None
) -> demo.DemoReport:
    if args.backend:
        os.environ[env.BACKEND.name] = args.backend
    replay = Replay(
        schedule,
        device=args.device,
        context_parallel=context_parallel(args),
        replay_window=args.replay_window,
        pad_requests_to=args.pad_requests_to or pad_requests_to or 1,
    )
    return demo.run_demo(replay, picture, demo.default_progress(args.json))
