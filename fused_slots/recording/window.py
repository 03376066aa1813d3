"""A part of a schedule, as a schedule: its steps behind the rows as they stood before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fused_slots.recording.schedule import Append, Schedule, ScheduleStep

_ENTRY_BYTES, _GROUP_BYTES = 16, 8
_APPEND_BYTES, _COUNT_BYTES, _EDIT_BYTES, _ID_BYTES = 8, 4, 8, 4


def step_bytes(schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes of each step's arrays and events, [steps]."""
    arrays, groups = schedule.arrays, len(schedule.groups)
    of_entries = _ENTRY_BYTES + _GROUP_BYTES * groups
    of_entries = of_entries + _EDIT_BYTES * arrays["truth_edits"].sum(axis=1, dtype=np.int64)
    of_appends = arrays["append_counts"].sum(axis=1, dtype=np.int64) * _ID_BYTES
    of_appends += _APPEND_BYTES + _COUNT_BYTES * groups
    size = np.full(len(schedule), 8, np.int64)
    for of_items, counts in ((of_entries, "step_entries"), (of_appends, "step_appends")):
        before = np.concatenate([[0], np.cumsum(of_items)])
        size += np.diff(before[np.concatenate([[0], np.cumsum(arrays[counts])])])
    for index, texts in schedule.events.items():
        if index < len(size):
            size[index] += sum(map(len, texts))
    return size


def window(schedule: Schedule, first: int, last: int) -> tuple[Schedule, int]:
    """Steps `first` to `last` of a schedule, both included.

    Returns:
        The part, and how many appends its first step begins with that build the rows as they stood.
    """
    rows: dict[int, list[list[int]]] = {}
    num_rows_before = 0

    def steps() -> Iterator[ScheduleStep]:
        nonlocal num_rows_before
        for index, step in enumerate(schedule):
            if index == first:
                num_rows_before = len(rows)
                before = (Append(row, tuple(blocks), True) for row, blocks in rows.items())
                yield replace(step, appends=(*before, *step.appends))
            elif index > last:
                return
            elif index > first:
                yield step
            else:
                for append in step.appends:
                    rows[append.req_index] = append.after(rows.get(append.req_index))

    part = schedule.with_steps(steps())
    return part, num_rows_before
