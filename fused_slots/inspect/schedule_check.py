"""What can be wrong with a recorded schedule, without any manager: capacity, truth, aliasing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fused_slots.groups import NULL_BLOCK_ID, KVCacheGroup
from fused_slots.inspect.schedule import Append, Schedule, ScheduleStep


def check_schedule(schedule: Schedule) -> Iterator[str]:
    """Findings of a schedule whose file could be read, in the order of its steps.

    - Every row named once a step, no request in two rows, no row over its capacity.
    - The rows that the appends build hold the KV manager's blocks (which may be null where the
      row still has the freed block), and as many of them.
    - Every token of a paged group has a block, and no block is written for two requests, or in
      two groups, of one step (all groups share the pool).
    """
    rows: list[dict[int, list[int]]] = [{} for _ in schedule.groups]
    for index, step in enumerate(schedule):
        where = f"step {index}"
        for append in step.appends:
            yield from _append(where, schedule.groups, rows, append)
        yield from _check_batch(where, step)
        yield from _check_truth(where, schedule.groups, rows, step)
        yield from _check_writes(where, schedule.groups, step)


def _append(
    where: str,
    groups: tuple[KVCacheGroup, ...],
    rows: list[dict[int, list[int]]],
    append: Append,
) -> Iterator[str]:
    for g, (group, block_ids) in enumerate(zip(groups, append.block_ids, strict=True)):
        row = rows[g].setdefault(append.req_index, [])
        if append.overwrite:
            row.clear()
        row.extend(block_ids)
        if len(row) > group.max_num_blocks:
            yield (
                f"{where}: row {append.req_index} of group {g} holds {len(row)} blocks, its "
                f"capacity is {group.max_num_blocks}"
            )


def _check_batch(where: str, step: ScheduleStep) -> Iterator[str]:
    for name, values in (("row", step.idx_mapping), ("request", step.request_ids)):
        seen, counts = np.unique(values, return_counts=True)
        for value in seen[counts > 1].tolist():
            yield f"{where}: {name} {value} stands in the batch more than once"


def _check_truth(
    where: str,
    groups: tuple[KVCacheGroup, ...],
    rows: list[dict[int, list[int]]],
    step: ScheduleStep,
) -> Iterator[str]:
    for g in range(len(groups)):
        for req_index, held in zip(step.idx_mapping.tolist(), step.expected_blocks[g], strict=True):
            row = np.array(rows[g].get(req_index, []), np.int32)
            if len(row) != len(held):
                yield (
                    f"{where}: row {req_index} of group {g} has {len(row)} blocks, the KV "
                    f"manager {len(held)}"
                )
                continue
            for column in np.flatnonzero((row != held) & (held != NULL_BLOCK_ID)).tolist():
                yield (
                    f"{where}: row {req_index} of group {g}, column {column} is block "
                    f"{row[column]}, the KV manager says {held[column]}"
                )


def _check_writes(
    where: str, groups: tuple[KVCacheGroup, ...], step: ScheduleStep
) -> Iterator[str]:
    writers: dict[int, tuple[int, int]] = {}
    for g, group in enumerate(groups):
        if not group.maps_slots:
            continue
        for entry, held in enumerate(step.expected_blocks[g]):
            begin, end = step.query_start_loc[entry : entry + 2].tolist()
            if begin == end:
                continue
            req_index = int(step.idx_mapping[entry])
            first, last = int(step.positions[begin]), int(step.positions[end - 1])
            columns = (
                range(1)
                if group.circular
                else range(first // group.block_size, last // group.block_size + 1)
            )
            for column in columns:
                block = int(held[column]) if column < len(held) else NULL_BLOCK_ID
                if block == NULL_BLOCK_ID:
                    yield (
                        f"{where}: row {req_index} of group {g} writes column {column}, where "
                        "the KV manager holds no block"
                    )
                elif writers.setdefault(block, (g, entry)) != (g, entry):
                    other_group, other_entry = writers[block]
                    yield (
                        f"{where}: block {block} is written by row {req_index} in group {g} and "
                        f"by row {step.idx_mapping[other_entry]} in group {other_group}"
                    )
