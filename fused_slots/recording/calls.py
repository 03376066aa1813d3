"""The calls of one manager as flat arrays: the second version of a schedule file.

A call's inputs stand in `inputs` as they were passed, one after another: idx_mapping,
query_start_loc, positions, num_computed_tokens, replay_start, replay_len, int64 as two int32 (low,
high), what was not given left out. Rows are what writes made of them; the first call of a file may
write all rows anew, where a recording begins in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntFlag
from types import MappingProxyType
from typing import Any

import numpy as np

from fused_slots.groups import KVCacheGroup
from fused_slots.recording.arrays import (
    AnyIntArray,
    Int32Array,
    Int64Array,
    ScheduleError,
    check_below,
    check_lengths,
    describe,
    ends,
)
from fused_slots.recording.steps import Append, Call, ScheduleStep

CALL_ARRAYS = {
    "calls": False,  # [calls, 7] as FIELDS
    "inputs": False,  # [inputs]
    "write_rows": False,  # [writes]
    "write_kinds": False,  # [writes] as `_APPEND` and so on
    "write_begins": True,  # [writes, groups] allocation blocks that stay
    "write_counts": True,  # [writes, groups] allocation blocks that follow
    "write_blocks": False,  # [written blocks], by write, then by group
}

FIELDS = (
    *("kind", "num_entries", "num_positions", "num_reqs_padded", "num_tokens_padded"),
    *("slots_width", "num_writes"),
)

_APPEND, _OVERWRITE, _WRITE, _CLEAR = range(4)


class Kind(IntFlag):
    """What a call did and was given; `Call` says more."""

    GATHERS = 1
    MAPS = 2
    DRAFTS = 4
    WIDE_INDEX = 8
    COMPUTED = 16
    REPLAY_START = 32
    REPLAY_LEN = 64
    TABLES_OUT = 128
    INTO_STEPS = 256
    GRAPH = 512


_CHOICES = {
    "gathers": Kind.GATHERS,
    "maps": Kind.MAPS,
    "drafts": Kind.DRAFTS,
    "tables_out": Kind.TABLES_OUT,
    "into_steps": Kind.INTO_STEPS,
    "has_computed": Kind.COMPUTED,
    "graph": Kind.GRAPH,
}
"""The fields of a `Call` that are yes or no."""


def encode(steps: Iterable[ScheduleStep], num_groups: int) -> dict[str, Int32Array]:
    """The arrays of calls."""
    calls: list[tuple[int, ...]] = []
    inputs: list[Int32Array] = []
    writes: list[Append] = []
    for step in steps:
        assert step.call is not None
        calls.append(_fields(step, step.call))
        inputs += _inputs(step, step.call)
        writes += step.appends
    return {
        "calls": np.array(calls, np.int32).reshape(-1, len(FIELDS)),
        "inputs": np.concatenate([np.zeros(0, np.int32), *inputs]),
        "write_rows": np.array([write.req_index for write in writes], np.int32),
        "write_kinds": np.array([_kind_of(write) for write in writes], np.int32),
        "write_begins": np.array(
            [write.first_blocks or (0,) * num_groups for write in writes], np.int32
        ).reshape(-1, num_groups),
        "write_counts": np.array(
            [[len(ids) for ids in write.block_ids] for write in writes], np.int32
        ).reshape(-1, num_groups),
        "write_blocks": np.array(
            [block for write in writes for ids in write.block_ids for block in ids], np.int32
        ),
    }


def _fields(step: ScheduleStep, call: Call) -> tuple[int, ...]:
    choices = {
        **{kind: getattr(call, name) for name, kind in _CHOICES.items()},
        Kind.WIDE_INDEX: step.idx_mapping.dtype == np.int64,
        Kind.REPLAY_START: call.replay_start is not None,
        Kind.REPLAY_LEN: call.replay_len is not None,
    }
    return (
        sum(kind for kind, chosen in choices.items() if chosen),
        len(step.idx_mapping),
        len(step.positions),
        call.num_reqs_padded,
        call.num_tokens_padded,
        call.slots_width,
        len(step.appends),
    )


def _inputs(step: ScheduleStep, call: Call) -> list[Int32Array]:
    parts: list[AnyIntArray | None] = [
        step.idx_mapping,
        step.query_start_loc if call.maps else None,
        step.positions,
        step.num_computed_tokens if call.has_computed else None,
        call.replay_start,
        call.replay_len,
    ]
    return [np.ascontiguousarray(part).view(np.int32) for part in parts if part is not None]


def _kind_of(write: Append) -> int:
    if write.cleared:
        return _CLEAR
    return _WRITE if write.first_blocks else _OVERWRITE if write.overwrite else _APPEND


def input_sizes(kind: int, entries: int, positions: int, rows: int) -> tuple[int, ...]:
    """int32 numbers of each input of a call, in their order."""
    return (
        entries * (2 if kind & Kind.WIDE_INDEX else 1),
        entries + 1 if kind & Kind.MAPS else 0,
        2 * positions,
        rows if kind & Kind.COMPUTED else 0,
        entries if kind & Kind.REPLAY_START else 0,
        entries if kind & Kind.REPLAY_LEN else 0,
    )


def call_sizes(calls: AnyIntArray, max_num_reqs: int) -> Int64Array:
    """int32 numbers of the inputs of each call."""
    sizes = (
        sum(input_sizes(kind, entries, positions, max_num_reqs))
        for kind, entries, positions, *_ in calls.tolist()
    )
    return np.fromiter(sizes, np.int64, len(calls))


def call_keys(arrays: Mapping[str, Int32Array], max_num_reqs: int) -> list[bytes]:
    """What each call did and was given, writes apart: equal bytes for equal calls."""
    calls, inputs = arrays["calls"], arrays["inputs"]
    stops = np.cumsum(call_sizes(calls, max_num_reqs)).tolist()
    return [
        fields[:-1].tobytes() + inputs[begin:end].tobytes()
        for fields, begin, end in zip(calls, [0, *stops], stops, strict=False)
    ]


def split(
    arrays: Mapping[str, Int32Array], counts: Sequence[int], max_num_reqs: int, num_groups: int
) -> list[dict[str, Int32Array]]:
    """Flat arrays of several recordings, one behind another, as those of each, to be validated.

    Args:
        arrays: as in a file.
        counts: calls of each recording.
        max_num_reqs, num_groups: of all of them.

    Raises:
        ValueError: something is left.
    """
    left, parts = dict(arrays), []
    for count in counts:
        calls = left["calls"][: count * len(FIELDS)].reshape(-1, len(FIELDS))
        writes = int(calls[:, -1].sum(dtype=np.int64))
        blocks = int(left["write_counts"][: writes * num_groups].sum(dtype=np.int64))
        lengths = {
            "calls": calls.size,
            "inputs": int(call_sizes(calls, max_num_reqs).sum()),
            **dict.fromkeys(("write_rows", "write_kinds"), writes),
            **dict.fromkeys(("write_begins", "write_counts"), writes * num_groups),
            "write_blocks": blocks,
        }
        parts.append({array: left[array][:length] for array, length in lengths.items()})
        left = {array: left[array][length:] for array, length in lengths.items()}
    if any(len(values) for values in left.values()):
        raise ValueError(f"more in the arrays than the calls of {len(counts)} ranks have")
    return parts


def decode(
    arrays: Mapping[str, Int32Array], groups: Sequence[KVCacheGroup], max_num_reqs: int
) -> Iterator[ScheduleStep]:
    """The calls of validated arrays; each row of a step is the caller's to keep."""
    held = [dict[int, Int32Array]() for _ in groups]
    owners: dict[int, int] = {}
    nothing = np.zeros(0, np.int32)
    writes = _writes(arrays)
    num_requests = place = 0
    for fields in arrays["calls"].tolist():
        kind, entries, positions, *_, num_writes = fields
        appends = tuple(next(writes) for _ in range(num_writes))
        for append in appends:
            row = append.req_index
            if append.overwrite or append.cleared or row not in owners:
                owners[row], num_requests = num_requests, num_requests + 1
            for g, blocks in enumerate(append.block_ids):
                old = held[g].get(row, nothing)
                new = np.array(blocks, np.int32)
                held[g][row] = np.concatenate([old[: append.kept(g, old)], new])
        sizes = input_sizes(kind, entries, positions, max_num_reqs)
        begin, place = place, place + sum(sizes)
        parts = np.split(arrays["inputs"][begin:place], np.cumsum(sizes)[:-1])
        yield as_call(fields, parts, appends, owners, held)


def as_call(
    fields: Sequence[int],
    parts: Sequence[Int32Array],
    appends: tuple[Append, ...],
    owners: Mapping[int, int] = MappingProxyType({}),
    held: Sequence[Mapping[int, Int32Array]] = (),
) -> ScheduleStep:
    """A call of these `FIELDS` and inputs, and the requests and blocks of its rows, if known."""
    kind, entries, _, num_reqs_padded, num_tokens_padded, slots_width, _ = fields
    index, starts, positions, computed, replay_start, replay_len = (part.copy() for part in parts)
    rows: AnyIntArray = index.view(np.int64) if kind & Kind.WIDE_INDEX else index
    if kind & Kind.DRAFTS:
        starts = np.arange(entries + 1, dtype=np.int32)
    elif not kind & Kind.MAPS:
        starts = np.zeros(entries + 1, np.int32)
    nothing = np.zeros(0, np.int32)
    numbers = rows.tolist()
    return ScheduleStep(
        appends=appends,
        request_ids=np.array([owners.get(row, -1) for row in numbers], np.int32),
        idx_mapping=rows,
        query_start_loc=starts,
        positions=positions.view(np.int64),
        num_computed_tokens=computed,
        expected_blocks=tuple(
            tuple(of_group.get(row, nothing) for row in numbers) for of_group in held
        ),
        call=Call(
            **{name: bool(kind & choice) for name, choice in _CHOICES.items()},
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            slots_width=slots_width,
            replay_start=replay_start if kind & Kind.REPLAY_START else None,
            replay_len=replay_len if kind & Kind.REPLAY_LEN else None,
        ),
    )


def _writes(arrays: Mapping[str, Int32Array]) -> Iterator[Append]:
    blocks, block_ends = arrays["write_blocks"], ends(arrays["write_counts"])
    for write, (row, kind) in enumerate(
        zip(arrays["write_rows"].tolist(), arrays["write_kinds"].tolist(), strict=True)
    ):
        spans = zip(arrays["write_counts"][write], block_ends[write], strict=True)
        yield Append(
            row,
            tuple(blocks[end - n : end].tolist() for n, end in spans),
            kind in (_OVERWRITE, _CLEAR),
            tuple(arrays["write_begins"][write].tolist()) if kind == _WRITE else (),
            kind == _CLEAR,
        )


def validate_calls(
    arrays: Mapping[str, Int32Array],
    *,
    groups: Sequence[KVCacheGroup],
    max_num_reqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
) -> None:
    """Check everything that decoding and replaying relies on; a call may have any tokens.

    Raises:
        ScheduleError: names the array, the first bad item, its group and what was allowed.
    """
    calls = arrays["calls"].astype(np.int64)
    check_below("calls", calls, 2**31)
    check_below("kinds of calls", calls[:, 0], 2 * Kind.GRAPH)
    for number, fields in enumerate(calls.tolist()):
        kind, entries, positions = fields[:3]
        wrong = (
            (kind & Kind.DRAFTS and (kind & ~(Kind.DRAFTS | 8 | 256 | 512) or positions != entries))
            or (kind & Kind.REPLAY_LEN and not kind & Kind.REPLAY_START)
            or (kind & (Kind.REPLAY_START | Kind.REPLAY_LEN) and not kind & Kind.MAPS)
            or (not kind & (Kind.MAPS | Kind.DRAFTS) and positions)
            or (kind & (Kind.COMPUTED | Kind.TABLES_OUT) and not kind & Kind.GATHERS)
            or (not kind & (Kind.GATHERS | Kind.MAPS | Kind.DRAFTS) and entries)
        )
        if wrong:
            raise ScheduleError(
                f"calls[{number}]", expected="a call that a manager has", actual=str(fields)
            )
    writes, blocks = int(calls[:, -1].sum()), arrays["write_counts"]
    check_below("write_counts", blocks, 2**31)
    check_lengths(
        arrays,
        {
            "inputs": int(call_sizes(calls, max_num_reqs).sum()),
            **dict.fromkeys(("write_rows", "write_kinds", "write_begins", "write_counts"), writes),
            "write_blocks": int(blocks.sum(dtype=np.int64)),
        },
    )
    check_below("write_rows", arrays["write_rows"], max_num_reqs)
    check_below("write_kinds", arrays["write_kinds"], _CLEAR + 1)
    check_below("write_blocks", arrays["write_blocks"], num_blocks)
    _check_rows(arrays, groups, max_num_reqs)


def _check_rows(
    arrays: Mapping[str, Int32Array], groups: Sequence[KVCacheGroup], max_num_reqs: int
) -> None:
    """Check that each write begins within its row and ends within its capacity."""
    lengths = np.zeros((max_num_reqs, len(groups)), np.int64)
    capacity = np.array([group.max_num_blocks for group in groups], np.int64)
    for write, row in enumerate(arrays["write_rows"].tolist()):
        kind, begins = arrays["write_kinds"][write], arrays["write_begins"][write]
        kept = begins if kind == _WRITE else lengths[row] if kind == _APPEND else 0 * begins
        new = kept + arrays["write_counts"][write]
        bad = np.flatnonzero((kept < 0) | (kept > lengths[row]) | (new > capacity))
        if len(bad):
            g = int(bad[0])
            raise ScheduleError(
                f"write {write} to row {row} of {describe(groups, g)}",
                expected=f"a begin in [0, {lengths[row, g]}] and at most {capacity[g]} blocks",
                actual=f"{arrays['write_counts'][write, g]} blocks from {kept[g]} on",
            )
        lengths[row] = np.where(kind == _CLEAR, 0, kept) + arrays["write_counts"][write]


def bytes_of_call(
    arrays: Mapping[str, Int32Array], settings: Mapping[str, Any], num_groups: int
) -> int:
    """Bytes of the largest buffers of a caller's that a replay makes."""
    calls = arrays["calls"].astype(np.int64).reshape(-1, len(FIELDS))
    tables = calls[calls[:, 0] & Kind.TABLES_OUT > 0, 3].max(initial=0) * sum(settings["widths"])
    return int(4 * tables + 8 * num_groups * calls[:, 5].max(initial=0))
