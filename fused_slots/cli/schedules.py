"""Commands on recorded schedules: demo, replay, check."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_slots import env
from fused_slots.cli.progress import announce, with_progress
from fused_slots.cli.result import Result, Status, check_writable
from fused_slots.faults import BackendUnavailableError
from fused_slots.groups import ContextParallel
from fused_slots.inspect.demo import MAPPED, PADDED, DemoReport, run_demo
from fused_slots.inspect.pictures import Film, require_matplotlib
from fused_slots.recording.arrays import ScheduleError, ScheduleSizeError, UnknownRecordingError
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import Schedule, load_schedule
from fused_slots.recording.shipped import list_recordings
from fused_slots.reference import Outcome

MAX_FINDINGS = 20
"""Findings printed in full; a document has up to fifty times as many."""


@dataclass(frozen=True)
class _Drawn:
    """A report, and why its picture could not be written."""

    report: DemoReport
    error: str = ""


def run_demo_command(args: argparse.Namespace) -> Result:
    """Replay one recording or all of them."""
    names = list_recordings() if args.recording == "all" else (args.recording,)
    draw = not args.no_picture
    if draw:
        try:
            require_matplotlib()
        except BackendUnavailableError as error:
            draw = False
            announce(args, f"fused-slots demo: goes on without a picture. {error}")
    pictures = [
        args.output / f"block_tables_{Path(name).name.split('.')[0]}.{args.format}"
        for name in names
    ]
    for picture in pictures if draw else ():
        check_writable(picture)
    drawn = [
        _replay(args, _load(args, name), picture if draw else None)
        for name, picture in zip(names, pictures, strict=True)
    ]
    good = all(one.report.good for one in drawn)
    return _result(
        {"good": good, "replays": [one.report.document() for one in drawn]},
        "\n\n".join(one.report.text() for one in drawn),
        next((one.error for one in drawn if one.error), ""),
    )


def run_replay(args: argparse.Namespace) -> Result:
    """Replay one recording."""
    if args.picture is not None:
        require_matplotlib()
        check_writable(args.picture)
    drawn = _replay(args, _load(args, args.recording), args.picture)
    report = drawn.report
    return _result({"good": report.good, **report.document()}, report.text(), drawn.error)


def run_check(args: argparse.Namespace) -> Result:
    """Check one recording."""
    steps, count = 0, 0
    findings: list[str] = []
    check: ScheduleCheck | CallCheck | None = None
    try:
        schedule = _load(args, args.recording)
        steps = len(schedule)
        watched = with_progress(args, schedule, steps, "check")
        checks = ScheduleCheck if schedule.settings is None else CallCheck
        check = checks(schedule, watched)
        for finding in check:
            count += 1
            if count <= 50 * MAX_FINDINGS:
                findings.append(finding)
    except (ScheduleSizeError, UnknownRecordingError):
        raise
    except ScheduleError as error:
        count, findings = 1, [str(error)]
    document = {
        "file": args.recording,
        "good": not count,
        "steps": steps,
        "num_findings": count,
        "findings": findings,
    }
    did: list[str] = []
    if isinstance(check, CallCheck):
        document["calls"] = counts = call_counts(check)
        did = [f"  {what}: {_listed(of_kind)}" for what, of_kind in counts.items()]
    if not count:
        lines = [f"{args.recording}: {steps} steps, no finding", *did]
        return Result(Status.GOOD, document, "\n".join(lines))
    lines = [f"{args.recording}: {count} finding{'s'[: count > 1]}", *did, *findings[:MAX_FINDINGS]]
    if count > MAX_FINDINGS:
        lines.append(f"... and {count - MAX_FINDINGS} more")
    return Result(Status.FINDING, document, "\n".join(lines))


def call_counts(check: CallCheck) -> dict[str, dict[str, int]]:
    """What recorded calls did: tokens mapped, tokens padded by reason, rows gathered by kind."""
    total = sum(check.outcomes, Counter[Outcome]())
    return {
        "mapped": {label: total[outcome] for outcome, label in MAPPED.items()},
        "padded": {label: total[outcome] for outcome, label in PADDED.items()},
        "rows gathered": dict(check.copies),
    }


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {label}" for label, count in counts.items() if count) or "none"


def _load(args: argparse.Namespace, recording: str) -> Schedule:
    return load_schedule(recording, args.max_mib << 20)


def _replay(args: argparse.Namespace, schedule: Schedule, picture: Path | None) -> _Drawn:
    if args.backend:
        os.environ[env.BACKEND.name] = args.backend
    film = None if picture is None else Film(schedule)
    replay = Replay(
        schedule,
        device=args.device,
        context_parallel=ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave),
        replay_window=args.replay_window,
        pad_requests_to=args.pad_requests_to,
    )
    steps = with_progress(args, replay, len(schedule), schedule.name)
    report = run_demo(replay, film, steps)
    if film is None or picture is None:
        return _Drawn(report)
    try:
        report.picture = str(film.draw(picture))
    except OSError as error:  # what was found is printed all the same
        return _Drawn(report, f"{error.filename or picture}: {error.strerror or error}")
    return _Drawn(report)


def _result(document: dict[str, Any], text: str, error: str) -> Result:
    status = Status.GOOD if document["good"] else Status.FINDING
    return Result(Status.WRONG_USE if error else status, document, text, error)
