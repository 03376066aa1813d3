"""The steps of a scheduler as flat arrays: the first version of a schedule file.

Block lists of running requests hardly change from step to step, so the truth is kept as edits
(column, block) of what the same row held the last time it was scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from fused_slots.groups import KVCacheGroup
from fused_slots.recording.arrays import ARRAYS, Int32Array, Int64Array, ScheduleError, ends
from fused_slots.recording.steps import Append, ScheduleStep

Events = Mapping[int, tuple[str, ...]]


def encode_steps(
    steps: Iterable[ScheduleStep], groups: Sequence[KVCacheGroup], max_num_reqs: int
) -> tuple[dict[str, Int32Array], Events]:
    """The arrays of steps, and their events.

    Raises:
        ScheduleError: a step does not fit the groups and sizes.
    """
    columns: dict[str, list[int]] = {array: [] for array in ARRAYS}
    events = {}
    truth = _empty_truth(groups, max_num_reqs)
    last: dict[tuple[int, int], Int32Array] = {}  # an array that came before has no edits
    try:
        for index, step in enumerate(steps):
            _encode_step(columns, step, truth, last)
            if step.events:
                events[index] = tuple(step.events)
        return {array: np.array(values, np.int32) for array, values in columns.items()}, events
    except (IndexError, ValueError, OverflowError) as error:
        raise ScheduleError(
            f"step {index}", expected="a step that fits the groups and sizes", actual=str(error)
        ) from error


def _encode_step(
    columns: dict[str, list[int]],
    step: ScheduleStep,
    truth: list[Int32Array],
    last: dict[tuple[int, int], Int32Array],
) -> None:
    columns["step_entries"].append(len(step.idx_mapping))
    columns["step_appends"].append(len(step.appends))
    columns["request_ids"].extend(step.request_ids.tolist())
    columns["rows"].extend(step.idx_mapping.tolist())
    columns["num_scheduled"].extend(np.diff(step.query_start_loc).tolist())
    columns["num_computed"].extend(step.positions[step.query_start_loc[:-1]].tolist())
    for append in step.appends:
        columns["append_rows"].append(append.req_index)
        columns["append_overwrite"].append(append.overwrite)
        for block_ids in append.block_ids:
            columns["append_counts"].append(len(block_ids))
            columns["append_blocks"].extend(block_ids)
    nothing = np.zeros(0, np.int64)
    for entry, row in enumerate(step.idx_mapping.tolist()):
        for g, (held, blocks_of) in enumerate(zip(truth, step.expected_blocks, strict=True)):
            blocks, edited = blocks_of[entry], nothing
            if last.get((g, row)) is not blocks:
                last[g, row] = blocks
                edited = np.flatnonzero(held[row, : len(blocks)] != blocks)
                held[row, edited] = blocks[edited]
            columns["truth_blocks"].append(len(blocks))
            columns["truth_edits"].append(len(edited))
            columns["edit_columns"].extend(edited.tolist())
            columns["edit_blocks"].extend(blocks[edited].tolist())


def decode_steps(
    arrays: Mapping[str, Int32Array],
    groups: Sequence[KVCacheGroup],
    max_num_reqs: int,
    events: Events,
) -> Iterator[ScheduleStep]:
    """The steps of validated arrays; every array of a step is the caller's to keep."""
    entry_ends, append_ends = ends(arrays["step_entries"]), ends(arrays["step_appends"])
    edit_ends, block_ends = ends(arrays["truth_edits"]), ends(arrays["append_counts"])
    truth = _empty_truth(groups, max_num_reqs)
    num_computed_tokens = np.zeros(max_num_reqs, np.int32)
    entry = append = 0
    for index in range(len(entry_ends)):
        entries = range(entry, entry := int(entry_ends[index]))
        appends = range(append, append := int(append_ends[index]))
        span = slice(entries.start, entries.stop)
        rows, computed = arrays["rows"][span].copy(), arrays["num_computed"][span]
        query_start_loc = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(arrays["num_scheduled"][span], out=query_start_loc[1:])
        num_computed_tokens[rows] = computed
        token_offset = np.repeat(computed - query_start_loc[:-1], np.diff(query_start_loc))
        yield ScheduleStep(
            appends=tuple(_append(arrays, a, block_ends) for a in appends),
            request_ids=arrays["request_ids"][span].copy(),
            idx_mapping=rows,
            query_start_loc=query_start_loc,
            positions=token_offset.astype(np.int64) + np.arange(query_start_loc[-1]),
            num_computed_tokens=num_computed_tokens.copy(),
            expected_blocks=_apply_edits(arrays, truth, entries, edit_ends),
            events=events.get(index, ()),
        )


def _append(arrays: Mapping[str, Int32Array], append: int, block_ends: Int64Array) -> Append:
    spans = zip(arrays["append_counts"][append], block_ends[append], strict=True)
    return Append(
        int(arrays["append_rows"][append]),
        tuple(arrays["append_blocks"][end - n : end].tolist() for n, end in spans),
        bool(arrays["append_overwrite"][append]),
    )


def _apply_edits(
    arrays: Mapping[str, Int32Array], truth: list[Int32Array], entries: range, edit_ends: Int64Array
) -> tuple[tuple[Int32Array, ...], ...]:
    blocks_of: list[list[Int32Array]] = [[] for _ in truth]
    for entry in entries:
        row = arrays["rows"][entry]
        for g, held in enumerate(truth):
            end = int(edit_ends[entry, g])
            edits = slice(end - int(arrays["truth_edits"][entry, g]), end)
            held[row, arrays["edit_columns"][edits]] = arrays["edit_blocks"][edits]
            blocks_of[g].append(held[row, : arrays["truth_blocks"][entry, g]].copy())
    return tuple(map(tuple, blocks_of))


def _empty_truth(groups: Iterable[KVCacheGroup], max_num_reqs: int) -> list[Int32Array]:
    return [np.zeros((max_num_reqs, group.max_num_blocks), np.int32) for group in groups]
