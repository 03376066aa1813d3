"""Commands on recorded schedules: demo, replay, check."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fused_slots import env
from fused_slots.cli.progress import announce, with_progress
from fused_slots.cli.result import Result, Status, check_writable, write
from fused_slots.faults import BackendUnavailableError
from fused_slots.groups import ContextParallel
from fused_slots.inspect.demo import MAPPED, PADDED, DemoReport, run_demo
from fused_slots.inspect.pictures import Film, require_matplotlib
from fused_slots.recording.arrays import ScheduleError, ScheduleSizeError, UnknownRecordingError
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.ranks import align
from fused_slots.recording.ranks_check import RanksCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import (
    MAX_RANKS,
    Schedule,
    load_ranks,
    load_schedule,
    pack_ranks,
)
from fused_slots.recording.shipped import list_recordings
from fused_slots.reference import Outcome

MAX_FINDINGS = 20
"""Findings printed in full; a document has up to fifty times as many."""

_ANNOUNCED_BYTES = 2 << 20
"""Files that take a second or more to read."""


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
    return _results(
        [
            _replay(args, load_schedule(name, args.max_mib << 20), picture if draw else None)
            for name, picture in zip(names, pictures, strict=True)
        ]
    )


def run_replay(args: argparse.Namespace) -> Result:
    """Replay one recording, or those of all ranks one after another; a picture shows the first."""
    if args.picture is not None:
        require_matplotlib()
        check_writable(args.picture)
    ranks = load_job(args).ranks
    if len(ranks) > 1:
        ranks = tuple(replace(r, name=f"{r.name}, rank {n}") for n, r in enumerate(ranks))
    first, *others = ranks
    report = _replay(args, first, args.picture)
    if others:
        return _results([report, *(_replay(args, rank, None) for rank in others)])
    return _result({"good": report.good, **report.document()}, report.text(), report.error)


def run_check(args: argparse.Namespace) -> Result:
    """Check one recording, or those of all ranks together."""
    try:
        return _check(args, load_job(args))
    except (ScheduleSizeError, UnknownRecordingError):
        raise
    except ScheduleError as error:
        name, findings = " ".join(args.recording), [str(error)]
        document = {"file": name, "good": False, "steps": 0, "num_findings": 1}
        text = f"{name}: 1 finding\n{error}"
        return Result(Status.FINDING, {**document, "findings": findings}, text)


def run_merge(args: argparse.Namespace) -> Result:
    """Write the recordings of all ranks as one, and check it; what is found is written too."""
    check_writable(args.output, args.recording)
    job = load_job(args)
    announce(args, f"merge: writing {args.output}")
    write(args.output, pack_ranks(job.ranks))
    return _check(args, replace(job, name=str(args.output)))


@dataclass(frozen=True)
class Job:
    """A recording, or those of all ranks."""

    name: str
    ranks: tuple[Schedule, ...]

    @property
    def notes(self) -> list[str]:
        """What was said of the ranks when they were aligned."""
        texts = [str(rank.metadata.get("aligned", ""))[:1000] for rank in self.ranks]
        return texts if len(texts) > 1 else []

    def check(self, args: argparse.Namespace) -> ScheduleCheck | CallCheck | RanksCheck:
        """What iterates over its findings and shows how far it is."""
        schedule, total = self.ranks[0], len(self.ranks[0])
        if len(self.ranks) > 1:
            steps = zip(*self.ranks, strict=False)
            return RanksCheck(self.ranks, with_progress(args, steps, total, args.command))
        checks = ScheduleCheck if schedule.settings is None else CallCheck
        return checks(schedule, with_progress(args, schedule, total, args.command))


def load_job(args: argparse.Namespace) -> Job:
    """What the command line names: one recording, or one of each rank."""
    names, max_bytes = args.recording, args.max_mib << 20
    compressed = sum(Path(name).stat().st_size for name in names if Path(name).is_file())
    if compressed > _ANNOUNCED_BYTES:
        announce(args, f"{args.command}: reading {compressed >> 20} MiB")
    if len(names) == 1 and args.command != "merge":
        return Job(names[0], load_ranks(names[0], max_bytes))
    if len(names) > MAX_RANKS:
        raise ScheduleError(
            "recordings", expected=f"at most {MAX_RANKS}, one a rank", actual=str(len(names))
        )
    ranks = align([(name, load_schedule(name, max_bytes)) for name in names])
    return Job(" ".join(names), ranks)


def _check(args: argparse.Namespace, job: Job) -> Result:
    steps, count = len(job.ranks[0]), 0
    findings: list[str] = []
    check = job.check(args)
    for finding in check:
        count += 1
        if count <= 50 * MAX_FINDINGS:
            findings.append(finding)
    document = {
        "file": job.name,
        "good": not count,
        "steps": steps,
        "num_findings": count,
        "findings": findings,
    }
    did = [f"  {note}" for note in job.notes]
    if job.notes:
        document |= {"ranks": len(job.ranks), "notes": job.notes}
    if isinstance(check, (CallCheck, RanksCheck)):
        document["calls"] = counts = call_counts(check)
        did += [f"  {what}: {_listed(of_kind)}" for what, of_kind in counts.items()]
    ranks = f" of {len(job.ranks)} ranks" if len(job.ranks) > 1 else ""
    if not count:
        lines = [f"{job.name}: {steps} steps{ranks}, no finding", *did]
        return Result(Status.GOOD, document, "\n".join(lines))
    lines = [f"{job.name}: {count} finding{'s'[: count > 1]}", *did, *findings[:MAX_FINDINGS]]
    if count > MAX_FINDINGS:
        lines.append(f"... and {count - MAX_FINDINGS} more")
    return Result(Status.FINDING, document, "\n".join(lines))


def call_counts(check: CallCheck | RanksCheck) -> dict[str, dict[str, int]]:
    """What recorded calls did: tokens mapped, tokens padded by reason, rows gathered by kind."""
    total = sum(check.outcomes, Counter[Outcome]())
    return {
        "mapped": {label: total[outcome] for outcome, label in MAPPED.items()},
        "padded": {label: total[outcome] for outcome, label in PADDED.items()},
        "rows gathered": dict(check.copies),
    }


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {label}" for label, count in counts.items() if count) or "none"


def _replay(args: argparse.Namespace, schedule: Schedule, picture: Path | None) -> DemoReport:
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
    if film is not None and picture is not None:
        try:
            report.picture = str(film.draw(picture))
        except OSError as error:  # what was found is printed all the same
            report.error = f"{error.filename or picture}: {error.strerror or error}"
    return report


def _results(reports: Sequence[DemoReport]) -> Result:
    good = all(report.good for report in reports)
    return _result(
        {"good": good, "replays": [report.document() for report in reports]},
        "\n\n".join(report.text() for report in reports),
        next((report.error for report in reports if report.error), ""),
    )


def _result(document: dict[str, Any], text: str, error: str) -> Result:
    status = Status.GOOD if document["good"] else Status.FINDING
    return Result(Status.WRONG_USE if error else status, document, text, error)
