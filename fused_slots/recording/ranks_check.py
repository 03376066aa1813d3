"""What can be wrong among the ranks of one context parallel group, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

import numpy as np

from fused_slots.recording.arrays import describe
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.calls import call_keys
from fused_slots.recording.check import Finding, FindingKind
from fused_slots.recording.ranks import listed
from fused_slots.recording.schedule import Schedule
from fused_slots.recording.steps import Call, ScheduleStep
from fused_slots.reference import Outcome

_INPUTS = ("idx_mapping", "query_start_loc", "positions", "num_computed_tokens")
_REPLAY = ("replay_start", "replay_len")
_DEALT = (Outcome.PAGED, Outcome.OTHER_RANK)

Steps = Sequence[ScheduleStep]
"""The same call of every rank, by rank."""


class RanksCheck:
    """Findings in the aligned calls of all ranks, in their order; iterate it once.

    - The first call in which a rank was given, or its rows hold, something else than the others'.
    - What `CallCheck` finds, with the ranks where not all have it.
    - Tokens of a sharded group that have a slot on none of the ranks, or on several; tokens of a
      replicated group whose slots differ. (Of calls in which the ranks map the same tokens; drafts
      and replays of graphs may have none, since engines capture them over empty rows.)

    Args:
        ranks: as `align` gives them.
        steps: their steps, all ranks' of one call together, where somebody watches them go by.
    """

    def __init__(self, ranks: Sequence[Schedule], steps: Iterable[Steps] | None = None) -> None:
        self._groups = ranks[0].groups
        self._steps = zip(*ranks, strict=False) if steps is None else steps
        self._checks = [CallCheck(rank) for rank in ranks]
        self._keys = [call_keys(rank.arrays, rank.max_num_reqs) for rank in ranks]
        self._rows: list[dict[int, list[list[int]]]] = [{} for _ in ranks]
        self._together = list(range(len(ranks)))
        first = ranks[0].metadata.get("calls_before")
        self._calls_before = first if isinstance(first, int) else 0

    @property
    def outcomes(self) -> list[Counter[Outcome]]:
        """Tokens by outcome, of all ranks and groups."""
        return [outcomes for check in self._checks for outcomes in check.outcomes]

    @property
    def copies(self) -> Counter[str]:
        """Gathered rows by what changed in them, of all ranks."""
        return sum((check.copies for check in self._checks), Counter[str]())

    def __iter__(self) -> Iterator[Finding]:
        everybody = range(len(self._checks))
        for index, steps in enumerate(self._steps):
            yield from self._compare(index, steps)
            found: dict[Finding, list[int]] = {}
            for rank, (check, step) in enumerate(zip(self._checks, steps, strict=True)):
                for finding in check.of_step(index, step):
                    found.setdefault(finding, []).append(rank)
            for finding, having in found.items():
                if len(having) < len(everybody):
                    finding = finding.on(listed(having))
                yield finding
            if len({keys[index] for keys in self._keys}) == 1:
                yield from self._check_owners(index, steps[0])

    def _compare(self, index: int, steps: Steps) -> Iterator[Finding]:
        touched = sorted({append.req_index for step in steps for append in step.appends})
        for held, step in zip(self._rows, steps, strict=True):
            for append in step.appends:
                held[append.req_index] = append.after(held.get(append.req_index))
        alike: dict[Any, list[int]] = {}
        for rank in self._together:
            rows = [self._rows[rank].get(row, []) for row in touched]
            alike.setdefault((self._keys[rank][index], str(rows)), []).append(rank)
        most = max(alike.values(), key=len, default=[])
        for parting in alike.values():
            if parting is not most:
                yield self._difference(index, steps, parting, most, touched)
        self._together = most

    def _difference(
        self, index: int, steps: Steps, parting: list[int], most: list[int], touched: list[int]
    ) -> Finding:
        """The first thing in which the calls, and the rows behind them, differ."""
        ours, theirs = parting[0], most[0]
        call = f"call {self._calls_before + index}" if index else "the rows before the first call"
        here, there = f"on {listed(parting)}", f"on {listed(most)}"
        texts, where = [], {"row": -1, "group": -1, "column": -1}
        keys = [[*self._keys[rank][index : index + 2], b"", b""] for rank in (ours, theirs)]
        if keys[0][0] and keys[0][0] == keys[1][1] != keys[1][0]:
            texts.append(f"{listed(parting)} missed it, and made the next one in its place")
        elif keys[1][0] and keys[1][0] == keys[0][1] != keys[0][0]:
            texts.append(f"{listed(parting)} made one before it that {listed(most)} did not make")
        elif text := _other_inputs(steps[ours], steps[theirs], here, there):
            texts.append(text)
        rows = [self._rows[rank] for rank in (ours, theirs)]
        for row, g in ((row, g) for row in touched for g in range(len(self._groups))):
            held = [of_rank[row][g] if row in of_rank else [] for of_rank in rows]
            if held[0] != held[1]:
                pairs = enumerate(zip_longest(*held, fillvalue="none"))
                column, blocks = next((c, pair) for c, pair in pairs if pair[0] != pair[1])
                texts.append(
                    f"row {row} of {describe(self._groups, g)} holds {len(held[0])} "
                    f"block{'s'[: len(held[0]) != 1]} {here} and {len(held[1])} {there}; block "
                    f"{column} is {blocks[0]} and {blocks[1]}"
                )
                where = {"row": row, "group": g, "column": column}
                break
        text = f"{listed(parting)} and {listed(most)} part in {call}: {'; '.join(texts)}"
        return Finding(FindingKind.RANKS_PART, index, text, **where)

    def _check_owners(self, index: int, step: ScheduleStep) -> Iterator[Finding]:
        assert step.call is not None
        may_fault = step.call.drafts or step.call.graph
        for g, group in enumerate(self._groups):
            bad: dict[tuple[int, str], list[int]] = {}
            for of_ranks in zip(*(check.tokens[g] for check in self._checks), strict=True):
                owners = [rank for rank, token in enumerate(of_ranks) if token.slot >= 0]
                if group.dcp_sharded and group.kind.is_paged:
                    live = any(token.outcome in _DEALT for token in of_ranks)
                    if not live or len(owners) == 1 or (may_fault and not owners):
                        continue
                    text = f"a slot on {listed(owners) if owners else 'no rank'}"
                elif len({token.slot for token in of_ranks}) > 1:
                    text = "another slot on one rank than on another"
                else:
                    continue
                bad.setdefault((of_ranks[0].row, text), []).append(of_ranks[0].position)
            for (row, text), at in bad.items():
                text = (
                    f"{len(at)} token{'s'[: len(at) > 1]} of row {row} in "
                    f"{describe(self._groups, g)} ha{'ve' if len(at) > 1 else 's'} {text}, the "
                    f"first at position {at[0]}"
                )
                yield Finding(FindingKind.NOT_ONE_OWNER, index, text, row=row, group=g)


def _other_inputs(ours: ScheduleStep, theirs: ScheduleStep, here: str, there: str) -> str:
    """The first input of a call that differs, and where; "" = none does."""
    calls = ours.call, theirs.call
    for name in (field.name for field in fields(Call)):
        one, other = (getattr(call, name) for call in calls)
        if not isinstance(one, np.ndarray) and not isinstance(other, np.ndarray) and one != other:
            return f"{name} is {one} {here} and {other} {there}"
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in _INPUTS}
    pairs |= {name: (getattr(calls[0], name), getattr(calls[1], name)) for name in _REPLAY}
    for name, (one, other) in pairs.items():
        if one is None or other is None:
            if one is not other:
                return f"{name} was given {here if other is None else there} only"
            continue
        if one.dtype != other.dtype:
            return f"{name} is {one.dtype} {here} and {other.dtype} {there}"
        if np.array_equal(one, other):
            continue
        if len(one) != len(other):
            return f"{name} has {len(one)} items {here} and {len(other)} {there}"
        item = int(np.flatnonzero(one != other)[0])
        entry = item
        if name == "positions":
            entry = int(np.searchsorted(theirs.query_start_loc, item, side="right")) - 1
        of_row = ""
        if name != "num_computed_tokens" and 0 <= entry < len(theirs.idx_mapping):
            of_row = f" (row {theirs.idx_mapping[entry]})"
        return f"{name}[{item}]{of_row} is {one[item]} {here} and {other[item]} {there}"
    return ""
