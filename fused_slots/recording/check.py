"""What can be wrong with a recorded schedule, without any manager: capacity, truth, aliasing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import numpy as np

from fused_slots.groups import NULL_BLOCK_ID, KVCacheGroup
from fused_slots.recording.arrays import AnyIntArray, Int32Array, describe
from fused_slots.recording.schedule import Append, Schedule, ScheduleStep


class FindingKind(Enum):
    """What a finding means, for who reads it first."""

    OVER_CAPACITY = (
        "A request got more blocks than its row has columns. `append_block_ids` refuses such a "
        "call; the request is longer than the model length that the tables were made for."
    )
    REPEATED_ROW = "Two entries of the batch use one row, so one request works with the other's."
    REPEATED_REQUEST = "One request is in the batch twice: its tokens are mapped from two rows."
    ROW_LENGTH = (
        "The row was given more or fewer blocks than the request has: a call of append_block_ids "
        "was lost or came twice, or a new request did not overwrite the row of the one before. "
        "Tokens beyond the row's end get PAD and count as the fault COLUMN_OUT_OF_ROW."
    )
    OTHER_BLOCK = (
        "The row points to another block than the request has: attention reads, and new tokens "
        "overwrite, what belongs to somebody else."
    )
    NO_BLOCK = (
        "The request has no block where it writes or still reads: freed too early, or never "
        "allocated. Its keys and values go to the null block, or to whoever has the block now."
    )
    WRITTEN_TWICE = (
        "Double ownership: one block is written in one step for two requests, or in two groups, "
        "and each destroys what the other wrote."
    )
    FAULT = (
        "The device found no block for tokens that were to be mapped, or no such row, and padded "
        "them: their keys and values are not written. `take_faults` and `stats` count them."
    )
    RANKS_PART = (
        "Ranks that share their requests were not given the same: one missed a call, or got other "
        "blocks or positions. From there on they read and write what belongs to other tokens."
    )
    NOT_ONE_OWNER = (
        "A token of a sharded group has a slot on no rank or on several, or a replicated group has "
        "another slot for it on each: attention misses its keys and values, or counts them twice."
    )
    HELD_TWICE = (
        "Double ownership: two requests hold one block in a group whose blocks are never shared, "
        "or two groups of one pool hold it. (A prefix that requests share through the prefix cache "
        "is no finding.)"
    )
    OUT_OF_POOL = (
        "There is no such block: the row was written past the manager, whose append_block_ids "
        "refuses it, or the pool became smaller. Its slots lie outside of the KV cache."
    )
    TWO_COLUMNS = (
        "A block holds the tokens of one place in a text, so requests share it in one column or "
        "not at all: a wrong id was appended, or a block was handed out while somebody held it."
    )


class Finding(str):
    """A finding as a sentence that begins with its step, and what a picture needs to show it.

    Attributes:
        kind, step: what it is, and where.
        row, group, column, block: what is concerned; -1 = not one of these.
    """

    kind: FindingKind
    step: int
    row: int
    group: int
    column: int
    block: int

    def __new__(
        cls,
        kind: FindingKind,
        step: int,
        text: str,
        *,
        row: int = -1,
        group: int = -1,
        column: int = -1,
        block: int = -1,
    ) -> Finding:
        """`text` without its step."""
        finding = super().__new__(cls, f"step {step}: {text}")
        finding.kind, finding.step, finding.row = kind, step, row
        finding.group, finding.column, finding.block = group, column, block
        return finding

    def on(self, where: str) -> Finding:
        """The same, somewhere only."""
        place = {name: getattr(self, name) for name in ("row", "group", "column", "block")}
        return Finding(self.kind, self.step, f"{where}: {self.partition(': ')[2]}", **place)


class ScheduleCheck:
    """Findings of a scheduler's steps whose file could be read, in their order; iterate it once.

    - Every row named once a step, no request in two rows, no row over its capacity.
    - The rows that the appends build hold the KV manager's blocks (which may be null where the
      row still has the freed block), and as many of them.
    - Every column that a step's tokens write, or read behind them in a sliding window, holds a
      block, and no block is written for two requests, or in two groups, of one step (all groups
      share the pool). A state group writes the column of its last token.
    - No block is held by two requests of one step in a group that is not prefix-cacheable, or in
      two groups; and none is in two columns.

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

    def __iter__(self) -> Iterator[Finding]:
        for index, step in enumerate(self._steps):
            for append in step.appends:
                yield from self._append(index, append)
            for kind, name, values in (
                (FindingKind.REPEATED_ROW, "row", step.idx_mapping),
                (FindingKind.REPEATED_REQUEST, "request", step.request_ids),
            ):
                seen, counts = np.unique(values, return_counts=True)
                for value in seen[counts > 1].tolist():
                    text = f"{name} {value} stands in the batch more than once"
                    rows = step.idx_mapping[values == value]
                    yield Finding(kind, index, text, row=int(rows[0]))
            yield from self._compare_rows(index, step)
            yield from self._check_use(index, step)
            yield from self._check_holders(index, step)

    def _append(self, index: int, append: Append) -> Iterator[Finding]:
        groups, req_index = self._schedule.groups, append.req_index
        for g, block_ids in enumerate(append.block_ids):
            row, capacity = self._rows[g][req_index], len(self._rows[g][req_index])
            begin = 0 if append.overwrite else int(self._lengths[g, req_index])
            end = begin + len(block_ids)
            if end > capacity:
                text = (
                    f"row {req_index} of {describe(groups, g)} holds {end} blocks, its capacity "
                    f"is {capacity}"
                )
                yield Finding(FindingKind.OVER_CAPACITY, index, text, row=req_index, group=g)
                end = capacity
            row[begin:end] = block_ids[: end - begin]
            self._lengths[g, req_index] = end

    def _compare_rows(self, index: int, step: ScheduleStep) -> Iterator[Finding]:
        groups = self._schedule.groups
        for g, blocks_of in enumerate(step.expected_blocks):
            if self._agree(g, step.idx_mapping, blocks_of):
                continue
            for req_index, held in zip(step.idx_mapping.tolist(), blocks_of, strict=True):
                row = self._rows[g][req_index, : self._lengths[g, req_index]]
                what = f"row {req_index} of {describe(groups, g)}"
                if len(row) != len(held):
                    text = f"{what} has {len(row)} blocks, the KV manager {len(held)}"
                    yield Finding(FindingKind.ROW_LENGTH, index, text, row=req_index, group=g)
                    continue
                self.num_columns += len(held)
                for column in np.flatnonzero((row != held) & (held != NULL_BLOCK_ID)).tolist():
                    yield Finding(
                        FindingKind.OTHER_BLOCK,
                        index,
                        f"{what}, column {column} is block {row[column]}, the KV manager says "
                        f"{held[column]}",
                        row=req_index,
                        group=g,
                        column=column,
                    )

    def _agree(self, g: int, rows: AnyIntArray, blocks_of: Sequence[Int32Array]) -> bool:
        """Whether all rows of a batch are as they should be, which they mostly are."""
        lengths = self._lengths[g, rows]
        if lengths.tolist() != [len(held) for held in blocks_of]:
            return False
        held = np.concatenate([np.zeros(0, np.int32), *blocks_of])
        filled = np.arange(self._rows[g].shape[1]) < lengths[:, None]
        if ((self._rows[g][rows][filled] != held) & (held != NULL_BLOCK_ID)).any():
            return False
        self.num_columns += len(held)
        return True

    def _check_use(self, index: int, step: ScheduleStep) -> Iterator[Finding]:
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
                    where = {"row": req_index, "group": g, "column": column}
                    if block == NULL_BLOCK_ID:
                        verb = "writes" if column >= written else "reads"
                        text = (
                            f"{writer} {verb} column {column}, where the KV manager holds no block"
                        )
                        yield Finding(FindingKind.NO_BLOCK, index, text, **where)
                    elif column >= written and writers.setdefault(block, writer) != writer:
                        text = f"block {block} is written by {writer} and by {writers[block]}"
                        yield Finding(FindingKind.WRITTEN_TWICE, index, text, block=block, **where)

    def _check_holders(self, index: int, step: ScheduleStep) -> Iterator[Finding]:
        groups, known = self._schedule.groups, list[Int32Array]()
        for g, blocks_of in enumerate(step.expected_blocks):
            yield from held_twice(groups, index, g, step.idx_mapping, blocks_of)
            yield from at_two_columns(groups, index, g, step.idx_mapping, blocks_of)
            blocks = np.unique(np.concatenate([*blocks_of, np.zeros(0, np.int32)]))
            blocks = blocks[blocks != NULL_BLOCK_ID]
            others = np.concatenate([np.zeros(0, np.int32), *known])
            for block in blocks[np.isin(blocks, others)].tolist():
                other = next(other for other, of_group in enumerate(known) if block in of_group)
                text = (
                    f"block {block} is held in {describe(groups, other)} and in "
                    f"{describe(groups, g)}"
                )
                yield Finding(FindingKind.HELD_TWICE, index, text, group=g, block=block)
            known.append(blocks)

    def _columns(self, g: int, first: int, last: int) -> tuple[int, int, int]:
        """The first column that tokens `first` to `last` read, the first they write, the last."""
        group = self._schedule.groups[g]
        if group.circular:
            return 0, 0, 0
        reach, final = group.sliding_window_reach, last // group.block_size
        written = first // group.block_size if group.maps_slots else final
        return max(first - reach, 0) // group.block_size if reach else written, written, final


def held_twice(
    groups: Sequence[KVCacheGroup],
    index: int,
    g: int,
    rows: AnyIntArray,
    blocks_of: Sequence[Int32Array],
) -> Iterator[Finding]:
    """Blocks of a group that shares none which two rows of step `index` hold; 0 is no block."""
    if groups[g].prefix_cacheable:
        return
    blocks = np.concatenate([*blocks_of, np.zeros(0, np.int32)])
    holders = np.repeat(rows, [len(held) for held in blocks_of])
    pairs = np.stack([blocks, holders], axis=1)[blocks != NULL_BLOCK_ID]
    pairs = np.unique(pairs, axis=0)
    for place in np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0]).tolist():
        block, row = pairs[place].tolist()
        text = (
            f"block {block} of {describe(groups, g)}, which shares none, is held by "
            f"row {row} and by row {pairs[place + 1, 1]}"
        )
        yield Finding(FindingKind.HELD_TWICE, index, text, row=row, group=g, block=block)


def at_two_columns(
    groups: Sequence[KVCacheGroup],
    index: int,
    g: int,
    rows: AnyIntArray,
    blocks_of: Sequence[Int32Array],
) -> Iterator[Finding]:
    """Blocks that rows of step `index` hold in two columns, in a group that shares prefixes."""
    if not (groups[g].prefix_cacheable and groups[g].kind.is_paged):
        return
    lengths = [len(held) for held in blocks_of]
    blocks = np.concatenate([*blocks_of, np.zeros(0, np.int64)]).astype(np.int64)
    columns = np.concatenate([*map(np.arange, lengths), np.zeros(0, np.int64)])
    keys, places = np.unique(blocks << 32 | columns, return_index=True)
    places = places[keys >> 32 != NULL_BLOCK_ID]
    holders = np.repeat(rows, lengths)
    for twice in np.flatnonzero(blocks[places[1:]] == blocks[places[:-1]]).tolist():
        pair = places[twice : twice + 2].tolist()
        where = " and ".join(f"column {columns[at]} of row {holders[at]}" for at in pair)
        block, row = int(blocks[pair[0]]), int(holders[pair[1]])
        text = f"block {block} of {describe(groups, g)} is in {where}"
        yield Finding(FindingKind.TWO_COLUMNS, index, text, row=row, group=g, block=block)
