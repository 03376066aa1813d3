"""The report command: a recording as one page for a browser."""

from __future__ import annotations

import argparse

from fused_slots.cli.progress import announce, with_progress
from fused_slots.cli.result import Result, Status, check_writable
from fused_slots.groups import ContextParallel
from fused_slots.inspect.report import KeptFindings, build_report
from fused_slots.recording.as_scheduled import as_scheduled
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import load_schedule


def run_report(args: argparse.Namespace) -> Result:
    """Check a recording and write its page; a finding is a finding here too."""
    check_writable(args.output)
    context_parallel = ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave)
    schedule = load_schedule(args.recording, args.max_mib << 20)
    steps = len(schedule)
    checks = ScheduleCheck if schedule.settings is None else CallCheck
    findings = KeptFindings.of(checks(schedule, with_progress(args, schedule, steps, "report")))
    if schedule.settings is not None:
        context_parallel = ContextParallel(*schedule.settings["context_parallel"])
        schedule = as_scheduled(schedule)
    announce(args, "report: writing the page")
    page = build_report(
        schedule,
        findings,
        around=args.around,
        context_parallel=context_parallel,
        max_bytes=args.page_mib << 20,
    )
    args.output.write_bytes(page.content)
    good = not findings.count
    document = {
        "file": args.recording,
        "good": good,
        "steps": steps,
        "steps_shown": [page.first, page.last],
        "num_findings": findings.count,
        "report": str(args.output),
    }
    found = "no finding" if good else f"{findings.count} finding{'s'[: findings.count > 1]}"
    shown = "" if page.last - page.first + 1 == steps else f", of which {page.first} to {page.last}"
    text = f"{args.recording}: {steps} steps{shown}, {found}\n{args.output}: open it in a browser"
    return Result(Status.GOOD if good else Status.FINDING, document, text)
