"""A recorded schedule, and its file: the steps of a scheduler, or the calls of a manager.

Decoding goes forward and holds one step at a time.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fused_slots.faults import require_int
from fused_slots.groups import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.recording.archive import DAMAGE, MAX_BYTES, check_size, damaged, pack, unpack
from fused_slots.recording.arrays import (
    ARRAYS,
    Int32Array,
    ScheduleError,
    ScheduleSizeError,
    UnknownRecordingError,
    validate,
)
from fused_slots.recording.calls import (
    CALL_ARRAYS,
    FIELDS,
    bytes_of_call,
    decode,
    encode,
    split,
    validate_calls,
)
from fused_slots.recording.scheduler_steps import decode_steps, encode_steps
from fused_slots.recording.shipped import list_recordings, read_recording
from fused_slots.recording.steps import Append, Call, ScheduleStep

__all__ = ["Append", "Call", "Schedule", "ScheduleStep", "load_recording", "load_schedule"]

_MAX_TEXT = 1000
"""Characters of a name or an event."""

MAX_RANKS = 1024
"""Recordings in one file."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A recorded schedule; iterate it, or index it (a step costs decoding all before it).

    Attributes:
        num_blocks: allocation blocks of the pool that all groups share; id 0 is the null block.
            Of a manager's calls: one more than the largest id.
        metadata: how it was recorded, and counts of what happened in it.
        settings: of the manager whose calls these are: widths (columns of a row, per group),
            context_parallel (size, rank, interleave), replay_window, slot_dtype, null_block_id,
            num_blocks (of each group's pool, None = unknown). None = the steps of a scheduler.
    """

    name: str
    groups: tuple[KVCacheGroup, ...]
    max_num_reqs: int
    max_num_batched_tokens: int
    num_blocks: int
    metadata: Mapping[str, Any]
    _arrays: Mapping[str, Int32Array]
    _events: Mapping[int, tuple[str, ...]]
    settings: Mapping[str, Any] | None = None

    @classmethod
    def from_steps(
        cls,
        steps: Iterable[ScheduleStep],
        *,
        name: str,
        groups: Iterable[KVCacheGroup],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        metadata: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Encode `steps`; with `settings` each of them is a call.

        `num_computed_tokens` of rows outside a scheduler's step is not kept.

        Raises:
            ScheduleError: a step does not fit the sizes given; the message names the array.
        """
        groups = tuple(groups)
        header = {
            "name": name,
            "groups": groups,
            "max_num_reqs": max_num_reqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_blocks": num_blocks,
            "metadata": dict(metadata),
        }
        if settings is not None:
            return cls._checked({**header, "settings": settings}, encode(steps, len(groups)), {})
        arrays, events = encode_steps(steps, groups, max_num_reqs)
        return cls._checked(header, arrays, events)

    def with_steps(self, steps: Iterable[ScheduleStep], **changes: Any) -> Schedule:
        """Other steps of these groups and sizes: a scheduler's, or with `settings` calls."""
        names = ("name", "groups", "max_num_reqs", "max_num_batched_tokens", "num_blocks")
        same = {name: getattr(self, name) for name in (*names, "metadata")}
        return Schedule.from_steps(steps, **{**same, **changes})

    @classmethod
    def _checked(
        cls,
        header: Mapping[str, Any],
        arrays: Mapping[str, Int32Array],
        events: Mapping[int, tuple[str, ...]],
    ) -> Schedule:
        of_calls, num_groups = header.get("settings") is not None, len(header["groups"])
        shaped = {
            array: arrays[array].reshape(-1, num_groups) if by_group else arrays[array]
            for array, by_group in (CALL_ARRAYS if of_calls else ARRAYS).items()
        }
        if of_calls:
            shaped["calls"] = shaped["calls"].reshape(-1, len(FIELDS))
        schedule = cls(**header, _arrays=shaped, _events=events)
        sizes = ("groups", "max_num_reqs", "max_num_batched_tokens", "num_blocks")
        (validate_calls if of_calls else validate)(
            shaped, **{size: getattr(schedule, size) for size in sizes}
        )
        return schedule

    @property
    def arrays(self) -> Mapping[str, Int32Array]:
        """What a file keeps of the steps, by the names in `ARRAYS`; not to be changed."""
        return self._arrays

    @property
    def events(self) -> Mapping[int, tuple[str, ...]]:
        """The events of those steps that have any."""
        return self._events

    def __len__(self) -> int:
        return len(self._arrays["step_entries" if self.settings is None else "calls"])

    def __iter__(self) -> Iterator[ScheduleStep]:
        return self.steps()

    def __getitem__(self, index: int) -> ScheduleStep:
        position = range(len(self))[index]
        return next(islice(self.steps(), position, None))

    def steps(self) -> Iterator[ScheduleStep]:
        """Decode from the first step on; every array of a step is the caller's to keep."""
        if self.settings is not None:
            return decode(self._arrays, self.groups, self.max_num_reqs)
        return decode_steps(self._arrays, self.groups, self.max_num_reqs, self._events)

    def save(self, path: str | Path) -> None:
        """Write the schedule; the same schedule always gives the same bytes."""
        version = 1 if self.settings is None else 2
        Path(path).write_bytes(pack(self._header(), self._arrays, version))

    def _header(self) -> dict[str, Any]:
        groups = [
            {**asdict(group), "slot_mapping_mode": group.slot_mapping_mode.value}
            for group in self.groups
        ]
        for group in groups:
            del group["pool"]  # all groups of a schedule share one
        header = {
            "name": self.name,
            "groups": groups,
            "max_num_reqs": self.max_num_reqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_blocks": self.num_blocks,
            "metadata": dict(self.metadata),
            "events": [[index, list(texts)] for index, texts in self._events.items()],
        }
        if self.settings is not None:
            header["settings"] = dict(self.settings)
        return header


def load_schedule(path: str | Path, max_bytes: int = MAX_BYTES) -> Schedule:
    """Read a schedule file, or a recording that ships with the package.

    Args:
        path: a file, or the name of a recording where there is no file of that name.
        max_bytes: limit of what the file holds, and of one table of each group that it asks for.

    Raises:
        ScheduleError: there is none of that name, or it is no such file, is of another version,
            is damaged or too large, or holds the calls of several ranks.
        OSError: it cannot be opened.
    """
    schedule, *others = load_ranks(path, max_bytes)
    if others:
        raise ScheduleError(
            str(path), expected="a recording of one rank", actual=f"of {1 + len(others)} ranks"
        )
    return schedule


def load_ranks(path: str | Path, max_bytes: int = MAX_BYTES) -> tuple[Schedule, ...]:
    """Read a schedule file of any kind: one schedule, or one of each rank where it holds several.

    Raises:
        ScheduleError, OSError: as in `load_schedule`.
    """
    if Path(path).name == str(path) and not Path(path).suffix and not Path(path).exists():
        return (load_recording(str(path), max_bytes),)
    with Path(path).open("rb") as file:
        return _parse(file, str(path), max_bytes)


def pack_ranks(ranks: Sequence[Schedule]) -> bytes:
    """One file of the recordings of all ranks, which `align` has made alike."""
    header = ranks[0]._header()
    header["ranks"] = [[len(rank), dict(rank.metadata)] for rank in ranks]
    header["metadata"] = {}
    arrays = {
        array: np.concatenate([rank._arrays[array] for rank in ranks]) for array in CALL_ARRAYS
    }
    return pack(header, arrays, 3)


def load_recording(name: str, max_bytes: int = MAX_BYTES) -> Schedule:
    """Read a schedule that ships with the package.

    Raises:
        UnknownRecordingError: there is none; the message lists those there are.
    """
    if name not in list_recordings():
        known = ", ".join(list_recordings())
        raise UnknownRecordingError(
            "recording", expected=f"a file, or one of {known}", actual=repr(name)
        )
    return _parse(io.BytesIO(read_recording(name)), name, max_bytes)[0]


def _parse(file: BinaryIO, source: str, max_bytes: int) -> tuple[Schedule, ...]:
    version, header, arrays = unpack(file, source, max_bytes)
    try:
        events = {int(index): _texts(texts) for index, texts in header.pop("events")}
        groups = tuple(
            KVCacheGroup(**{**group, "slot_mapping_mode": SlotMappingMode(mode)})
            for group in header.pop("groups")
            for mode in [group["slot_mapping_mode"]]
        )
        for size in ("max_num_reqs", "max_num_batched_tokens", "num_blocks"):
            header[size] = require_int(size, header[size], minimum=1)
        _texts([header["name"], *(group.name for group in groups)])
        dict(**header["metadata"])
        rows, tokens = header["max_num_reqs"], header["max_num_batched_tokens"]
        widths = [group.row_width for group in groups]
        num_bytes = 0
        if (version > 1) != ("settings" in header):
            raise ValueError("settings of a manager belong to versions 2 and 3")
        if version > 1:
            header["settings"] = _settings(header["settings"], groups)
            widths = header["settings"]["widths"]
            num_bytes = bytes_of_call(arrays, header["settings"], len(groups))
        num_bytes += sum(4 * rows * width + 8 * tokens for width in widths)
        header["groups"] = groups
        if version == 3:
            counts, headers = _headers_of_ranks(header)
            parts = split(arrays, counts, rows, len(groups))
        else:
            headers, parts = [header], [arrays]
        check_size(source, num_bytes, max_bytes, "in block tables and slots", max_bytes)
        return tuple(
            Schedule._checked(header, part, events)
            for header, part in zip(headers, parts, strict=True)
        )
    except ScheduleSizeError:
        raise
    except DAMAGE as error:
        raise damaged(source, error) from error


def _headers_of_ranks(header: dict[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    """Numbers of calls and headers of all ranks of a file."""
    size, _, interleave = header["settings"]["context_parallel"]
    ranks = header.pop("ranks")
    if not 2 <= size <= MAX_RANKS or len(ranks) != size:
        raise ValueError(f"{len(ranks)} recordings of {size} ranks (at most {MAX_RANKS})")
    counts = [require_int("calls of a rank", calls, minimum=0) for calls, _ in ranks]
    headers = [
        {
            **header,
            "metadata": dict(**metadata),
            "settings": {**header["settings"], "context_parallel": [size, rank, interleave]},
        }
        for rank, (_, metadata) in enumerate(ranks)
    ]
    return counts, headers


def _texts(texts: list[str]) -> tuple[str, ...]:
    for text in texts:
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError(f"a text of at most {_MAX_TEXT} characters is none: {str(text)[:50]}")
    return tuple(texts)


def _settings(found: Mapping[str, Any], groups: tuple[KVCacheGroup, ...]) -> dict[str, Any]:
    """The settings of a manager that a file gives, all of them and no others."""
    widths = list(found["widths"])
    for width, group in zip(widths, groups, strict=True):
        minimum = group.max_num_blocks * group.columns_per_block
        require_int("widths", width, minimum=minimum)
    null, pools = found["null_block_id"], list(found.get("num_blocks") or [None] * len(groups))
    if found["slot_dtype"] not in ("int32", "int64"):
        raise ValueError(f"slot_dtype {str(found['slot_dtype'])[:50]!r}")
    ranks = ContextParallel(*found["context_parallel"])
    return {
        "widths": widths,
        "context_parallel": [ranks.size, ranks.rank, ranks.interleave],
        "replay_window": require_int("replay_window", found["replay_window"], minimum=0),
        "slot_dtype": found["slot_dtype"],
        "null_block_id": None if null is None else require_int("null_block_id", null, minimum=0),
        "num_blocks": [
            None if pool is None else require_int("num_blocks", pool, minimum=1)
            for pool, _ in zip(pools, groups, strict=True)
        ],
    }
