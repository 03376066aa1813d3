"""A recording as one self-contained page: verdict, findings, and tables at any step.

The page decodes the recording's own arrays in the browser. It loads nothing, and a content security
policy allows no script but its own: a recording is untrusted input, whose text is escaped here and
only ever set as text there.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from fused_slots.groups import ContextParallel
from fused_slots.recording.arrays import ARRAYS, ScheduleSizeError
from fused_slots.recording.check import Finding, FindingKind
from fused_slots.recording.schedule import Schedule
from fused_slots.recording.window import step_bytes, window

MAX_BYTES = 64 << 20
"""Default limit of the decoded steps in a page; they shrink to a tenth (docs/report.md)."""

MAX_FINDINGS = 1000
_MAX_FINDINGS_OF_A_STEP = 20
_SCRIPTS = ("recording.js", "pictures.js", "view.js")


@dataclass
class KeptFindings:
    """The findings that a page lists, and the numbers of all of them."""

    listed: list[Finding] = field(default_factory=list)
    by_step: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> KeptFindings:
        """Take in any number of findings, of which a bounded number is kept."""
        kept = cls()
        for finding in findings:
            kept.by_step[finding.step] += 1
            few = kept.by_step[finding.step] <= _MAX_FINDINGS_OF_A_STEP
            if few and len(kept.listed) < MAX_FINDINGS:
                kept.listed.append(finding)
        return kept

    @property
    def count(self) -> int:
        """All findings, listed or not."""
        return self.by_step.total()


@dataclass(frozen=True)
class Page:
    """A written-out report: HTML in UTF-8, and which steps (both included) it shows."""

    content: bytes
    first: int
    last: int


def build_report(
    schedule: Schedule,
    findings: KeptFindings,
    *,
    of_calls: bool = False,
    around: int | None = None,
    context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
    all_ranks: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Page:
    """The page of a recording.

    Args:
        schedule: the recording.
        findings: what `ScheduleCheck` found in it.
        of_calls: the recording is of a manager's calls, where no KV manager is known.
        around: the step to keep where not all steps fit; None = the first finding's, or the last.
        context_parallel: the rank whose slots the page derives.
        all_ranks: derive the slots of each token's owner; the tables are those of that rank.
        max_bytes: of the steps that the page holds, decoded.

    Raises:
        ScheduleSizeError: not even the rows at that step fit.
    """
    focus = min(findings.by_step, default=len(schedule) - 1) if around is None else around
    part, first, rows_before = _part(schedule, focus, max_bytes)
    last = first + len(part) - 1
    style, script = _asset("report.css"), "\n".join(map(_asset, _SCRIPTS))
    left_out = ""
    if len(part) != len(schedule):
        left_out = (
            f'<p class="left-out">This page holds steps {first} to {last} of {len(schedule):,}: '
            f"all would take more than {max_bytes >> 20} MiB. Findings are counted over all steps. "
            "<code>--around STEP</code> chooses others, <code>--page-mib</code> takes more.</p>"
        )
    ranks = {**vars(context_parallel), **({"rank": None} if all_ranks else {})}
    count = findings.count
    verdict = "No finding"
    if count:
        verdict = f"{count:,} finding{'s'[: count > 1]}, the first in step {min(findings.by_step)}"
    parts = {
        "script_hash": _hash(script),
        "style_hash": _hash(style),
        "style": style,
        "script": script,
        "title": html.escape(f"{schedule.name}: block tables"),
        "name": html.escape(schedule.name),
        "verdict": verdict,
        "verdict_class": "bad" if count else "good",
        "facts": _facts(schedule, context_parallel, of_calls, all_ranks),
        "left_out": left_out,
        "findings": _findings(findings, of_calls),
        "about": _about(schedule),
        "data": _json(_data(part, findings, first, rows_before, ranks)),
        "arrays": _packed(part),
    }
    # One pass, so that a marker in what is put in stays what it is.
    text = re.sub("@@([a-z_]+)@@", lambda marker: parts[marker[1]], _asset("report.html"))
    return Page(text.encode("utf-8", "xmlcharrefreplace"), first, last)  # lone surrogates


def _part(schedule: Schedule, focus: int, max_bytes: int) -> tuple[Schedule, int, int]:
    """The steps that a page holds, the first of them, and the appends of the rows before it."""
    first, last = _fitting(step_bytes(schedule), focus, max_bytes)
    if (first, last) == (0, len(schedule) - 1):
        return schedule, 0, 0
    part, rows_before = window(schedule, first, last)
    size = int(step_bytes(part).sum())
    if size > max_bytes:
        raise ScheduleSizeError(
            "page",
            expected=f"at most {max_bytes:,} bytes of rows and steps",
            actual=f"{size:,} around step {focus}",
            hint="Raise --page-mib",
        )
    return part, first, rows_before


def _fitting(sizes: np.ndarray[Any, Any], focus: int, max_bytes: int) -> tuple[int, int]:
    """First and last step around `focus`: three quarters of the room before it, or all that fit."""
    steps = len(sizes)
    if sizes.sum() <= max_bytes:
        return 0, steps - 1
    focus = min(max(focus, 0), steps - 1)
    room = max_bytes // 2  # the other half is for the rows as they stood
    before = np.cumsum(sizes[focus::-1])
    first = focus - max(int(np.searchsorted(before, room * 3 // 4, side="right")) - 1, 0)
    after = np.cumsum(sizes[focus + 1 :])
    left = room - int(sizes[first : focus + 1].sum())
    return first, focus + int(np.searchsorted(after, left, side="right"))


def _data(
    part: Schedule,
    findings: KeptFindings,
    first: int,
    rows_before: int,
    ranks: dict[str, int | None],
) -> dict[str, Any]:
    shown = range(first, first + len(part))
    return {
        "first": first,
        "rows_before": rows_before,
        "max_num_reqs": part.max_num_reqs,
        "context_parallel": ranks,
        "groups": [
            {
                "name": group.name,
                "kind": group.kind.label,
                "block_size": group.block_size,
                "kernel_block_size": group.tokens_per_column,
                "sliding_window_reach": group.sliding_window_reach,
                "prefix_cacheable": group.prefix_cacheable,
                "dcp_sharded": group.dcp_sharded,
            }
            for group in part.groups
        ],
        "lengths": [[array, part.arrays[array].size] for array in ARRAYS],
        "events": {index: part.events[index] for index in sorted(part.events)},
        "meanings": {kind.name: kind.value for kind in FindingKind},
        "findings": [
            {
                "kind": finding.kind.name,
                "text": finding,
                **{key: vars(finding)[key] for key in ("step", "row", "group", "column", "block")},
            }
            for finding in findings.listed
            if finding.step in shown
        ],
        "finding_steps": [[step, n] for step, n in findings.by_step.items() if step in shown],
    }


def _packed(part: Schedule) -> str:
    values = [part.arrays[array].astype("<i4").reshape(-1) for array in ARRAYS]
    return base64.b64encode(zlib.compress(np.concatenate(values).tobytes(), 6)).decode()


def _facts(schedule: Schedule, ranks: ContextParallel, of_calls: bool, all_ranks: bool) -> str:
    groups, requests = len(schedule.groups), len(np.unique(schedule.arrays["request_ids"]))
    facts = [
        f"{len(schedule):,} steps",
        f"{requests:,} requests",
        f"{groups} KV cache group{'s'[: groups > 1]}",
        f"{schedule.max_num_reqs:,} rows",
        f"{schedule.max_num_batched_tokens:,} tokens a step at most",
        f"block ids up to {schedule.num_blocks - 1:,}"
        if of_calls
        else f"a pool of {schedule.num_blocks:,} blocks",
    ]
    if all_ranks:
        facts.append(f"all {ranks.size} ranks, tables of rank {ranks.rank}")
    elif ranks.size > 1:
        facts.append(f"rank {ranks.rank} of {ranks.size}")
    return " &middot; ".join(facts)


def _findings(findings: KeptFindings, of_calls: bool) -> str:
    if not findings.count:
        agree = "rows and KV manager agree in every step, " * (not of_calls)
        unknown = (
            " Rows are as the engine appended them: a recording of a manager does not know what "
            "the engine's allocator meant."
        )
        return (
            f"<p>None: {agree}every token has a block, and no block has two owners but those that "
            f"share a prefix.{unknown * of_calls}</p>"
        )
    rows = "".join(
        f'<tr><td><a class="step" href="#step={finding.step}" data-step="{finding.step}">'
        f"{finding.step}</a></td><td>{html.escape(finding.partition(': ')[2])}</td>"
        f"<td>{html.escape(finding.kind.value)}</td></tr>"
        for finding in findings.listed
    )
    more = findings.count - len(findings.listed)
    note = f"<p>{more:,} more are not listed; <code>fused-slots check --json</code> has them.</p>"
    return (
        f"<table><tr><th>step</th><th>finding</th><th>what it means</th></tr>{rows}</table>"
        f"{note if more else ''}"
    )


def _about(schedule: Schedule) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(_short(value))}</td></tr>"
        for key, value in list(schedule.metadata.items())[:50]
    )
    return f"<table>{rows}</table>"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 2000 else f"{text[:2000]} ..."


def _json(value: Any) -> str:
    """JSON that ends no script element, whatever it holds."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (resources.files("fused_slots.inspect") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
