"""Commands on recorded schedules: demo, replay, check, record."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fused_slots import env
from fused_slots.cli.result import Result, Status
from fused_slots.groups import ContextParallel
from fused_slots.inspect import demo
from fused_slots.recording.arrays import ScheduleError
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.recorder import record
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import Schedule, load_recording, load_schedule
from fused_slots.recording.shipped import list_recordings

MAX_FINDINGS = 20
"""Findings printed in full."""


def run_demo(args: argparse.Namespace) -> Result:
    """Replay one recording or all of them."""
    names = list_recordings() if args.recording == "all" else (args.recording,)
    reports = []
    for name in names:
        picture = None if args.no_picture else args.output / f"block_tables_{name}.{args.format}"
        reports.append(_replay(args, load_recording(name), picture))
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
    report = _replay(args, schedule, args.picture)
    status = Status.GOOD if report.good else Status.FINDING
    return Result(status, {"good": report.good, **report.document()}, report.text())


def run_check(args: argparse.Namespace) -> Result:
    """Check one file."""
    steps = 0
    try:
        schedule = load_schedule(args.file)
        steps = len(schedule)
        findings = list(ScheduleCheck(schedule))
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


def _replay(args: argparse.Namespace, schedule: Schedule, picture: Path | None) -> demo.DemoReport:
    if args.backend:
        os.environ[env.BACKEND.name] = args.backend
    replay = Replay(
        schedule,
        device=args.device,
        context_parallel=ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave),
        replay_window=args.replay_window,
        pad_requests_to=args.pad_requests_to,
    )
    return demo.run_demo(replay, picture, demo.default_progress(args.json))
