"""A manager's recorded calls as the steps of a scheduler, for whoever draws those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from fused_slots.recording.schedule import Append, Schedule, ScheduleStep


def as_scheduled(schedule: Schedule, steps: Iterable[ScheduleStep] | None = None) -> Schedule:
    """The same number of steps, each with what its call mapped.

    `steps` are its own, where somebody watches them go by.

    An entry keeps the first position and the number of its tokens; dummies, rows that there are
    not, and rows that came before in the same call are left out. Drafts are no entries. Blocks that
    the call nulled, below a window, count as freed.
    """
    return schedule.with_steps(_steps(schedule, schedule if steps is None else steps))


def _steps(schedule: Schedule, steps: Iterable[ScheduleStep]) -> Iterator[ScheduleStep]:
    held: dict[int, list[list[int]]] = {}
    assert schedule.settings is not None
    groups, num_ranks = schedule.groups, schedule.settings["context_parallel"][0]
    capacity = schedule.max_num_batched_tokens
    for step in steps:
        assert step.call is not None
        appends = [_plain(append, held) for append in step.appends]
        rows, starts = step.idx_mapping.tolist(), step.query_start_loc.tolist()
        known = [row if 0 <= row < schedule.max_num_reqs else -1 for row in rows]
        shown = [
            (entry, starts[entry], starts[entry + 1])
            for entry, row in enumerate(known)
            if row >= 0 and row not in known[:entry] and step.call.maps
            if 0 <= starts[entry] < starts[entry + 1] <= min(capacity, len(step.positions))
            if 0 <= step.positions[starts[entry]] < 2**31 - capacity
        ]
        counts = [end - begin for _, begin, end in shown]
        while sum(counts) > capacity:  # entries that overlap
            counts.pop()
        shown = shown[: len(counts)]
        entries = [entry for entry, _, _ in shown]
        positions = [
            int(step.positions[begin]) + np.arange(count)
            for (_, begin, _), count in zip(shown, counts, strict=True)
        ]
        readable = [step.above_windows(g, group, num_ranks) for g, group in enumerate(groups)]
        yield replace(
            step,
            appends=tuple(appends),
            request_ids=step.request_ids[entries].clip(min=0),
            idx_mapping=step.idx_mapping[entries].astype(np.int32),
            query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
            positions=np.concatenate([np.zeros(0, np.int64), *positions]),
            expected_blocks=tuple(tuple(held[entry] for entry in entries) for held in readable),
            call=None,
        )


def _plain(append: Append, held: dict[int, list[list[int]]]) -> Append:
    """An append or an overwrite that leaves the row as this write does."""
    row = append.req_index
    old = held.get(row, [[] for _ in append.block_ids])
    held[row] = append.after(old)
    if all(append.kept(g, blocks) == len(blocks) for g, blocks in enumerate(old)):
        return Append(row, append.block_ids, False)
    return Append(row, tuple(map(list, held[row])), True)
