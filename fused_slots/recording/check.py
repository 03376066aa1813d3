"""What can be wrong with a recorded schedule, without any manager: capacity, truth, aliasing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fused_slots.groups import NULL_BLOCK_ID
from fused_slots.recording.arrays import describe
from fused_slots.recording.schedule import Append, Schedule, ScheduleStep


class ScheduleCheck:
    """Findings of a schedule whose file could be read, in the order of its steps; iterate it once.

    - Every row named once a step, no request in two rows, no row over its capacity.
    - The rows that the appends build hold the KV manager's blocks (which may be null where the
      row still has the freed block), and as many of them.
    - Every column that a step's tokens write, or read behind them in a sliding window, holds a
      block, and no block is written for two requests, or in two groups, of one step (all groups
      share the pool). A state group writes the column of its last token.

    Args:
        schedule: what is checked.
        steps: its steps, where somebody watches them go by.

    Attributes:
        num_columns: columns of rows that were compared with the KV manager's.
    """

    def __init__(self, schedule: Schedule, steps: Iterable[ScheduleStep] | None = None) -> None:
        self._schedule = schedule
        self._steps = schedule if steps is None else steps
        rows = schedule.max_num_reqs
        self._rows = [np.zeros((rows, g.max_num_blocks), np.int32) for g in schedule.groups]
        self._lengths = np.zeros((len(schedule.groups), rows), np.int64)
        self.num_columns = 0

    def __iter__(self) -> Iterator[str]:
        for index, step in enumerate(self._steps):
            where = f"step {index}"
            for append in step.appends:
                yield from self._append(where, append)
            for name, values in (("row", step.idx_mapping), ("request", step.request_ids)):
                seen, counts = np.unique(values, return_counts=True)
                for value in seen[counts > 1].tolist():
                    yield f"{where}: {name} {value} stands in the batch more than once"
            yield from self._compare_rows(where, step)
            yield from self._check_use(where, step)

    def _append(self, where: str, append: Append) -> Iterator[str]:
        groups = self._schedule.groups
        for g, block_ids in enumerate(append.block_ids):
            row, capacity = self._rows[g][append.req_index], len(self._rows[g][append.req_index])
            begin = 0 if append.overwrite else int(self._lengths[g, append.req_index])
            end = begin + len(block_ids)
            if end > capacity:
                yield (
                    f"{where}: row {append.req_index} of {describe(groups, g)} holds {end} "
                    f"blocks, its capacity is {capacity}"
                )
                end = capacity
            row[begin:end] = block_ids[: end - begin]
            self._lengths[g, append.req_index] = end

    def _compare_rows(self, where: str, step: ScheduleStep) -> Iterator[str]:
        groups = self._schedule.groups
        for g, blocks_of in enumerate(step.expected_blocks):
            for req_index, held in zip(step.idx_mapping.tolist(), blocks_of, strict=True):
                row = self._rows[g][req_index, : self._lengths[g, req_index]]
                what = f"{where}: row {req_index} of {describe(groups, g)}"
                if len(row) != len(held):
                    yield f"{what} has {len(row)} blocks, the KV manager {len(held)}"
                    continue
                self.num_columns += len(held)
                for column in np.flatnonzero((row != held) & (held != NULL_BLOCK_ID)).tolist():
                    yield (
                        f"{what}, column {column} is block {row[column]}, the KV manager says "
                        f"{held[column]}"
                    )

    def _check_use(self, where: str, step: ScheduleStep) -> Iterator[str]:
        groups, writers = self._schedule.groups, dict[int, str]()
        for entry, req_index in enumerate(step.idx_mapping.tolist()):
            begin, end = step.query_start_loc[entry : entry + 2].tolist()
            if begin == end:
                continue
            first, last = int(step.positions[begin]), int(step.positions[end - 1])
            for g, blocks_of in enumerate(step.expected_blocks):
                writer = f"row {req_index} of {describe(groups, g)}"
                read, written, final = self._columns(g, first, last)
                held = blocks_of[entry][read : final + 1].tolist()
                if final - read >= len(held):
                    held.append(NULL_BLOCK_ID)  # one finding for all that stand beyond the row
                for column, block in enumerate(held, start=read):
                    if block == NULL_BLOCK_ID:
                        verb = "writes" if column >= written else "reads"
                        yield (
                            f"{where}: {writer} {verb} column {column}, where the KV manager "
                            "holds no block"
                        )
                    elif column >= written and writers.setdefault(block, writer) != writer:
                        yield (
                            f"{where}: block {block} is written by {writer} and by {writers[block]}"
                        )

    def _columns(self, g: int, first: int, last: int) -> tuple[int, int, int]:
        """The first column that tokens `first` to `last` read, the first they write, the last."""
        group = self._schedule.groups[g]
        if group.circular:
            return 0, 0, 0
        reach, final = group.sliding_window_reach, last // group.block_size
        written = first // group.block_size if group.maps_slots else final
        return max(first - reach, 0) // group.block_size if reach else written, written, final
