"""Recordings of the ranks of one context parallel group, put together and compared.

Such ranks are given the same requests, blocks and positions, call by call, and each token of a
sharded group has a slot on exactly one of them. Where that is not so, somebody's attention reads
what nobody wrote; the first call in which ranks part is where to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_slots.faults import ConfigurationError, require_int
from fused_slots.recording.arrays import ScheduleError
from fused_slots.recording.calls import Kind, call_keys
from fused_slots.recording.kept import row_step
from fused_slots.recording.schedule import MAX_RANKS, Schedule
from fused_slots.recording.steps import Append, ScheduleStep

Named = tuple[str, Schedule]


def align(files: Sequence[Named]) -> tuple[Schedule, ...]:
    """The calls that all ranks of one group recorded, of files that begin and end anywhere.

    Args:
        files: names, for errors, and recordings, one a rank in any order.

    Returns:
        A recording a rank, by rank: a step with the rows as they stood, then as many calls as the
        others have. `metadata["aligned"]` says which calls these are, and what was left out.

    Raises:
        ScheduleError: these are not the ranks of one job, or have no call in common.
    """
    ranks = _by_rank(files)
    numbers = [_Numbers(name, schedule) for name, schedule in ranks]
    shifts = [of_rank.shift_to(numbers[0]) for of_rank in numbers]
    for of_rank, shift in zip(numbers, shifts, strict=True):
        of_rank.shift(shift)
    first, last = max(n.first for n in numbers), min(n.last for n in numbers)
    if first > last:
        held = ", ".join(f"{n.first} to {n.last} in {n.name}" for n in numbers)
        raise ScheduleError(
            "ranks",
            expected="recordings with calls in common",
            actual=f"calls {held}",
            hint="Write all files at one time, or keep more calls (FUSED_SLOTS_RECORD)",
        )
    replays = [n.replays(first, last) for n in numbers]
    kept = range(max(r.start for r in replays), min(r.stop for r in replays))
    num_blocks = max(schedule.num_blocks for _, schedule in ranks)
    aligned = []
    for rank, (of_rank, shift) in enumerate(zip(numbers, shifts, strict=True)):
        keep = of_rank.within(first, last, kept)
        note = (
            f"rank {rank}: calls {first} to {last} of {of_rank.first} to {of_rank.last} in "
            f"{of_rank.name}, {len(keep) - keep.sum() - of_rank.has_rows} left out"
        )
        if shift:
            note += (
                f". By what it was given, its call n is rank 0's call n{shift:+d}: it made so many "
                "fewer (or more) before, or its recording began at another time"
            )
        aligned.append(_cut(of_rank.schedule, keep, first - 1, num_blocks, note))
    return tuple(aligned)


def _by_rank(files: Sequence[Named]) -> list[Named]:
    """The files in the order of their ranks.

    Raises:
        ScheduleError: a rank is missing or there twice, or one was built otherwise than the rest.
    """
    by_rank: dict[int, Named] = {}
    for name, schedule in files:
        if schedule.settings is None:
            raise ScheduleError(name, expected="calls of a manager", actual="a scheduler's steps")
        size, rank, _ = schedule.settings["context_parallel"]
        if not 2 <= size <= MAX_RANKS:
            raise ScheduleError(
                f"context_parallel.size of {name}",
                expected=f"2 to {MAX_RANKS} ranks that share their groups",
                actual=str(size),
            )
        first = files[0][1]
        for (what, there), here in zip(
            _built(first).items(), _built(schedule).values(), strict=False
        ):
            if here != there:
                raise ScheduleError(
                    f"{what} of {name}",
                    expected=f"{there}, as in {files[0][0]} (ranks of one job are built alike)",
                    actual=str(here),
                )
        if rank in by_rank:
            raise ScheduleError(
                name,
                expected="each rank once",
                actual=f"rank {rank} again, after {by_rank[rank][0]} (processes "
                f"{schedule.metadata.get('rank')} and {by_rank[rank][1].metadata.get('rank')})",
                hint="Give one file of each rank of one context parallel group; if these two are, "
                "then both were built with the same context_parallel.rank",
            )
        by_rank[rank] = name, schedule
    if missing := [rank for rank in range(size) if rank not in by_rank]:
        raise ScheduleError(
            "ranks", expected=f"a file of each of {size} ranks", actual=f"none of {listed(missing)}"
        )
    return [by_rank[rank] for rank in range(size)]


def _built(schedule: Schedule) -> dict[str, Any]:
    """What managers of one job have in common, the number of groups first."""
    settings = dict(schedule.settings or {})
    size, _, interleave = settings.pop("context_parallel")
    settings.pop("num_blocks", None)  # known from some call of the engine on
    return {
        "groups": len(schedule.groups),
        **{
            f"groups[{g}].{field}": value
            for g, group in enumerate(schedule.groups)
            for field, value in asdict(group).items()
        },
        "max_num_reqs": schedule.max_num_reqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "context_parallel.size": size,
        "context_parallel.interleave": interleave,
        **settings,
    }


class _Numbers:
    """The calls of one file by their numbers: the host's, and of replays of graphs their own.

    Attributes:
        has_rows: 1 where the first step is no call but the rows as they stood.
        first, last: the host's calls in the file.
    """

    def __init__(self, name: str, schedule: Schedule) -> None:
        self.name, self.schedule = name, schedule
        calls, before, replays = (
            _count(name, schedule, key)
            for key in ("calls", "calls_before", "calls_of_graphs_before")
        )
        self.has_rows = len(schedule) - calls
        if self.has_rows not in (0, 1):
            raise ScheduleError(
                f"metadata['calls'] of {name}", expected=str(len(schedule)), actual=str(calls)
            )
        self._is_graph = schedule.arrays["calls"][:, 0] & Kind.GRAPH > 0
        self._host = before - self.has_rows + np.cumsum(~self._is_graph)
        self._replay = replays - 1 + np.cumsum(self._is_graph)
        self._is_call = np.arange(len(schedule)) >= self.has_rows
        self.first, self.last = before + 1, int(self._host.max(initial=before))

    def shift(self, by: int) -> None:
        """Number the host's calls otherwise."""
        self._host += by
        self.first, self.last = self.first + by, self.last + by

    def shift_to(self, other: _Numbers) -> int:
        """What makes the numbers of most calls those of another's calls with the same inputs; 0
        where the numbers of some are already."""
        ours, theirs = self._known(), other._known()
        shifts = Counter(theirs[key] - ours[key] for key in ours.keys() & theirs.keys())
        return 0 if not shifts or shifts[0] else shifts.most_common(1)[0][0]

    def _known(self) -> dict[bytes, int]:
        """The numbers of calls whose inputs come once."""
        keys = call_keys(self.schedule.arrays, self.schedule.max_num_reqs)
        times = Counter(keys)
        known = zip(keys, self._host.tolist(), self._is_graph.tolist(), strict=True)
        return {key: number for key, number, graph in known if times[key] == 1 and not graph}

    def replays(self, first: int, last: int) -> range:
        """Replays of graphs among these calls of the host."""
        found = self._replay[self._is_graph & (first - 1 <= self._host) & (self._host <= last)]
        return range(int(found[0]), int(found[-1]) + 1) if len(found) else range(0)

    def within(self, first: int, last: int, replays: range) -> npt.NDArray[np.bool_]:
        """Which steps are these calls."""
        among = (first - 1 <= self._host) & (self._host <= last) & self._is_call
        replayed = (replays.start <= self._replay) & (self._replay < replays.stop)
        return np.asarray(among & np.where(self._is_graph, replayed, self._host >= first), np.bool_)


def _count(name: str, schedule: Schedule, key: str) -> int:
    try:
        return require_int(key, schedule.metadata.get(key), minimum=0, maximum=2**53)
    except ConfigurationError:
        raise ScheduleError(
            f"metadata[{key!r}] of {name}",
            expected="a count",
            actual=repr(schedule.metadata.get(key))[:50],
            hint="Recordings of earlier versions number no calls; record again",
        ) from None


def _cut(
    schedule: Schedule,
    keep: npt.NDArray[np.bool_],
    calls_before: int,
    num_blocks: int,
    note: str,
) -> Schedule:
    """These calls, behind the rows as they stood before the first of them."""
    chosen = np.flatnonzero(keep)
    first, last = int(chosen[0]), int(chosen[-1])

    def steps() -> Iterator[ScheduleStep]:
        rows: dict[int, list[list[int]]] = {}
        for index, step in enumerate(schedule):
            if index == first:
                yield row_step([Append(row, tuple(rows[row]), True) for row in sorted(rows)])
            if index > last:
                return
            if keep[index]:
                yield step
            for append in step.appends if index < first else ():
                rows[append.req_index] = append.after(rows.get(append.req_index))

    metadata = {
        **schedule.metadata,
        "description": f"{len(chosen)} calls that all ranks recorded",
        "calls": len(chosen),
        "calls_before": calls_before,
        "aligned": note,
    }
    if last != len(keep) - 1:
        metadata["state"] = {}  # of the end of the file
    return schedule.with_steps(
        steps(), num_blocks=num_blocks, metadata=metadata, settings=schedule.settings
    )


def listed(ranks: Iterable[int]) -> str:
    """Ranks as findings name them."""
    numbers = list(map(str, ranks))
    return f"rank{'s'[: len(numbers) > 1]} {', '.join(numbers)}"
