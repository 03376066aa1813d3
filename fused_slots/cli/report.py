"""The report command: a recording as one page for a browser."""

from __future__ import annotations

import argparse

from fused_slots.cli.progress import announce, with_progress
from fused_slots.cli.result import Result, Status, check_writable, write
from fused_slots.cli.schedules import load_job
from fused_slots.faults import require_int
from fused_slots.groups import ContextParallel, check_shard
from fused_slots.inspect.report import KeptFindings, build_report
from fused_slots.recording.arrays import describe
from fused_slots.recording.as_scheduled import as_scheduled


def run_report(args: argparse.Namespace) -> Result:
    """Check a recording and write its page; a finding is a finding here too."""
    check_writable(args.output, args.recording)
    job = load_job(args)
    all_ranks = len(job.ranks) > 1
    if not all_ranks:
        context_parallel = ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave)
    schedule = job.ranks[ContextParallel(len(job.ranks), args.cp_rank).rank if all_ranks else 0]
    steps = len(schedule)
    if args.around is not None:
        require_int("--around", args.around, minimum=0, maximum=max(steps - 1, 0))
    if schedule.settings is None:
        for g, group in enumerate(schedule.groups):
            check_shard(group, context_parallel, describe(schedule.groups, g))
    findings = KeptFindings.of(job.check(args))
    if schedule.settings is not None:
        context_parallel = ContextParallel(*schedule.settings["context_parallel"])
        schedule = as_scheduled(schedule, with_progress(args, schedule, steps, "report: rows"))
    announce(args, "report: writing the page")
    page = build_report(
        schedule,
        findings,
        of_calls=job.ranks[0].settings is not None,
        around=args.around,
        context_parallel=context_parallel,
        all_ranks=all_ranks,
        max_bytes=args.page_mib << 20,
    )
    write(args.output, page.content)
    good = not findings.count
    document = {
        "file": job.name,
        "good": good,
        "steps": steps,
        "steps_shown": [page.first, page.last],
        "num_findings": findings.count,
        "report": str(args.output),
    }
    found = "no finding" if good else f"{findings.count} finding{'s'[: findings.count > 1]}"
    shown = "" if page.last - page.first + 1 == steps else f", of which {page.first} to {page.last}"
    text = f"{job.name}: {steps} steps{shown}, {found}\n{args.output}: open it in a browser"
    return Result(Status.GOOD if good else Status.FINDING, document, text)
