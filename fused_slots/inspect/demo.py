"""Replay a recorded schedule for people: progress, a table of what happened, a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fused_slots.inspect.pictures import Film
from fused_slots.recording.replay import MAX_MISMATCHES, Mismatch, Replay, ReplayedStep
from fused_slots.recording.schedule import Schedule
from fused_slots.reference import Outcome

MAPPED = {Outcome.PAGED: "in a paged block", Outcome.RING: "in a ring"}
PADDED = {
    Outcome.STATE_GROUP: "group of mode NONE (state)",
    Outcome.DUMMY: "dummy request (graph padding)",
    Outcome.REPLAYED: "replayed token of a shared block",
    Outcome.OTHER_RANK: "owned by another rank",
    Outcome.NEGATIVE_POSITION: "negative position",
    Outcome.ROW_OUT_OF_RANGE: "fault: no such row",
    Outcome.EMPTY_RING: "fault: ring without a block",
    Outcome.COLUMN_OUT_OF_ROW: "fault: column not filled",
    Outcome.NULL_BLOCK: "fault: the null block",
}
_BARS = "▁▂▃▄▅▆▇█"
_EVENTS = ("prefix hit", "preempted", "resumed", "finished", "aborted")


@dataclass
class DemoReport:
    """What one replay showed; `document()` for machines, `text()` for people."""

    schedule: Schedule
    replay: Replay
    blocks_in_use: list[tuple[int, ...]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    requests: set[int] = field(default_factory=set)
    picture: str = ""
    error: str = ""
    """Why the picture could not be written."""

    @property
    def good(self) -> bool:
        """Whether both oracles agreed with every table and every slot."""
        return self.replay.num_mismatches == 0

    def add(self, replayed: ReplayedStep) -> None:
        """Take in one replayed step."""
        self.blocks_in_use.append(replayed.blocks_in_use)
        self.mismatches += replayed.mismatches[: MAX_MISMATCHES - len(self.mismatches)]
        self.requests.update(replayed.step.request_ids.tolist())
        for text in replayed.step.events:
            self.events.update(kind for kind in _EVENTS if text.startswith(kind))

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        replay, groups = self.replay, self.schedule.groups
        total = sum(replay.outcomes, Counter[Outcome]())
        blocks = np.array(self.blocks_in_use).reshape(-1, len(groups))
        return {
            "recording": self.schedule.name,
            "metadata": dict(self.schedule.metadata),
            "device": str(replay.tables.device),
            "steps": replay.num_steps,
            "requests": len(self.requests),
            "tokens": replay.num_tokens,
            "events": {kind: self.events[kind] for kind in _EVENTS},
            "slots_mapped": {label: total[outcome] for outcome, label in MAPPED.items()},
            "slots_padded": {
                "tail behind the last token": replay.num_tail,
                **{label: total[outcome] for outcome, label in PADDED.items()},
            },
            "groups": [
                {
                    "name": group.name or f"group {g}",
                    "block_size": group.block_size,
                    "kernel_block_size": group.tokens_per_column,
                    "kind": group.kind.label,
                    "slots_mapped": sum(replay.outcomes[g][outcome] for outcome in MAPPED),
                    "slots_padded": sum(replay.outcomes[g][outcome] for outcome in PADDED),
                    "blocks_in_use_max": int(blocks[:, g].max(initial=0)),
                    "blocks_in_use": _sampled(blocks[:, g]),
                }
                for g, group in enumerate(groups)
            ],
            "microseconds_per_step": _spread(replay.microseconds),
            "launches": replay.tables.launches,
            "digest": replay.digest,
            "num_mismatches": replay.num_mismatches,
            "mismatches": [str(mismatch) for mismatch in self.mismatches],
            "picture": self.picture,
        }

    def text(self) -> str:
        """The report as a table."""
        document = self.document()
        time = document["microseconds_per_step"]
        one_a_step = "   one a step" if self.schedule.settings is None else ""
        events = ", ".join(f"{n} {kind}" for kind, n in document["events"].items() if n)
        head = [
            f"{document['recording']}: {self.schedule.metadata.get('description', '')}",
            "",
            f"  {'steps':<34}{document['steps']:>12,}",
            f"  {'requests':<34}{document['requests']:>12,}   {events}",
            f"  {'tokens':<34}{document['tokens']:>12,}",
            f"  {'launches':<34}{document['launches']:>12,}{one_a_step}",
            f"  {'microseconds a step, median':<34}{time['median']:>12,.0f}   "
            f"p20 {time['p20']:,.0f}, p80 {time['p80']:,.0f}, on {document['device']}, "
            "appends included",
            "",
            "  slots mapped",
            *_rows(document["slots_mapped"]),
            "  slots padded, by reason",
            *_rows(document["slots_padded"]),
            "",
            f"  {'group':<14}{'kind':<8}{'K':>6}{'B':>6}{'mapped':>12}{'padded':>12}"
            f"{'blocks max':>12}  blocks in use over time",
        ]
        body = [
            f"  {group['name']:<14}{group['kind']:<8}{group['block_size']:>6}"
            f"{group['kernel_block_size']:>6}{group['slots_mapped']:>12,}"
            f"{group['slots_padded']:>12,}{group['blocks_in_use_max']:>12,}  "
            f"{sparkline(group['blocks_in_use'])}"
            for group in document["groups"]
        ]
        return "\n".join([*head, *body, "", *self._verdict(document)])

    def _verdict(self, document: dict[str, Any]) -> list[str]:
        lines = [f"  digest  {document['digest'][:16]}"]
        if self.picture:
            lines.append(f"  picture {self.picture}")
        if self.good:
            other = "what the KV manager held" if self.schedule.settings is None else "the run's"
            return [
                *lines,
                f"  Every gathered table and every slot equals the scalar reference and {other}.",
            ]
        shown = [f"  {line}" for mismatch in self.mismatches for line in str(mismatch).split("\n")]
        return [*lines, f"  {self.replay.num_mismatches:,} MISMATCHES, the first of them:", *shown]


def run_demo(replay: Replay, film: Film | None, steps: Iterable[ReplayedStep]) -> DemoReport:
    """Replay, check and report one schedule.

    Args:
        replay: a fresh replay.
        film: takes in every step, to be drawn afterwards; None = no picture.
        steps: the replay, or an iterable that passes its steps through.
    """
    report = DemoReport(replay.schedule, replay)
    for replayed in steps:
        report.add(replayed)
        if film is not None:
            film.add(replayed)
    return report


def sparkline(values: Sequence[int]) -> str:
    """A row of bars, one a value, scaled to the largest."""
    top = max(values, default=0) or 1
    return "".join(_BARS[value * (len(_BARS) - 1) // top] for value in values)


def _rows(counts: dict[str, int]) -> list[str]:
    return [f"    {label:<32}{count:>12,}" for label, count in counts.items()]


def _sampled(values: Any, samples: int = 32) -> list[int]:
    if not len(values):
        return []
    picks = np.linspace(0, len(values) - 1, min(samples, len(values))).round().astype(int)
    return [int(value) for value in values[picks]]


def _spread(microseconds: Sequence[float]) -> dict[str, float]:
    if not microseconds:
        return {"median": 0.0, "p20": 0.0, "p80": 0.0}
    p20, median, p80 = np.percentile(microseconds, [20, 50, 80]).round(1).tolist()
    return {"median": median, "p20": p20, "p80": p80}
