"""The two oracles of a replay: what the KV manager held, and the scalar reference.

They share no code with the manager and none with each other, so agreement of all three means
something. The KV manager knows a request's allocation blocks; the reference knows the rules.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fused_slots.faults import INT32_MAX
from fused_slots.groups import NULL_BLOCK_ID, PAD_SLOT_ID, ContextParallel, KVCacheGroup
from fused_slots.recording.arrays import AnyIntArray
from fused_slots.recording.steps import Append, ScheduleStep
from fused_slots.reference import Outcome, gathered_row, map_token

Array = npt.NDArray[np.int64]

UNKNOWN = -2
"""A cell or slot about which an oracle has nothing to say."""

FAULTS = (
    *(Outcome.ROW_OUT_OF_RANGE, Outcome.EMPTY_RING),
    *(Outcome.COLUMN_OUT_OF_ROW, Outcome.NULL_BLOCK),
)


@dataclass(frozen=True)
class Batch:
    """One step as the manager is given it: recorded entries first, then dummies of one token.

    A recorded call is given as it was.

    Attributes:
        idx_mapping, query_start_loc, positions: with the dummies.
        replay_start: per batch entry, 0 = none.
        num_reqs: recorded entries, without dummies.
        num_tokens: tokens of the batch, those of dummies included; as many as have room.
        replay_len: per batch entry, where a call gave it.
        has_computed: num_computed_tokens is given.
    """

    idx_mapping: AnyIntArray
    query_start_loc: npt.NDArray[np.int32]
    positions: Array
    replay_start: npt.NDArray[np.int32]
    num_computed_tokens: npt.NDArray[np.int32]
    num_reqs: int
    num_tokens: int
    replay_len: npt.NDArray[np.int32] | None = None
    has_computed: bool = True


class KVManagerOracle:
    """Expects what the recorded KV manager held; has no opinion where it held the null block."""

    name = "the KV manager"

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        widths: Sequence[int],
        context_parallel: ContextParallel,
        replay_window: int,
    ) -> None:
        self._groups = groups
        self._widths = widths
        self._size = context_parallel.size
        self._replay_window = replay_window

    def block_table(self, g: int, step: ScheduleStep, batch: Batch) -> Array:
        """Gathered table [batch entries, width] that group `g` must show."""
        group, width = self._groups[g], self._widths[g]
        n = group.columns_per_block
        table = np.zeros((len(batch.idx_mapping), width), np.int64)
        for entry, held in enumerate(step.expected_blocks[g]):
            columns = np.repeat(held.astype(np.int64), n) * n + np.tile(np.arange(n), len(held))
            columns[np.repeat(held == NULL_BLOCK_ID, n)] = UNKNOWN
            if group.sliding_window_reach and self._size == 1:
                computed = int(batch.num_computed_tokens[batch.idx_mapping[entry]])
                first_readable = max(computed - group.sliding_window_reach, 0)
                columns[: first_readable // group.tokens_per_column] = NULL_BLOCK_ID
            table[entry, : len(columns)] = columns
        return table

    def slots(self, g: int, step: ScheduleStep, batch: Batch) -> Array:
        """Slots [tokens] of group `g`: the KV manager knows them as block * K + offset in block."""
        group = self._groups[g]
        slots = np.full(batch.num_tokens, PAD_SLOT_ID, np.int64)
        if not group.maps_slots:
            return slots
        if self._size > 1 and group.dcp_sharded:
            slots[:] = UNKNOWN
            return slots
        for entry, held in enumerate(step.expected_blocks[g]):
            span = slice(*batch.query_start_loc[entry : entry + 2].tolist())
            positions = batch.positions[span]
            block, offset = np.divmod(positions, group.block_size)
            if group.circular:
                block[:] = 0
            block_ids = np.append(held, NULL_BLOCK_ID)[np.minimum(block, len(held))]
            slots[span] = block_ids.astype(np.int64) * group.block_size + offset
            slots[span][block_ids == NULL_BLOCK_ID] = UNKNOWN
            start = int(batch.replay_start[entry])
            if group.prefix_cacheable and start:
                slots[span][(positions >= start) & (positions < start + self._replay_window)] = -1
        return slots


class ReferenceOracle:
    """Keeps every row by itself and maps token by token; counts why each slot is what it is.

    Attributes:
        outcomes: per group, how many tokens met each outcome.
    """

    name = "the scalar reference"

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        widths: Sequence[int],
        context_parallel: ContextParallel,
        replay_window: int,
        null_block_id: int | None = None,
        num_rows: int = INT32_MAX,
    ) -> None:
        self._groups = groups
        self._widths = widths
        self._context_parallel = context_parallel
        self._replay_window = replay_window
        self._null_block_id = null_block_id
        self._num_rows = num_rows
        self._rows: list[dict[int, array[int]]] = [{} for _ in groups]
        self.outcomes: list[Counter[Outcome]] = [Counter() for _ in groups]

    def append(self, append: Append) -> None:
        """Follow one call that changes a row."""
        for g, (group, block_ids) in enumerate(zip(self._groups, append.block_ids, strict=True)):
            n = group.columns_per_block
            row = self._rows[g].setdefault(append.req_index, array("i"))
            del row[append.kept(g, row[::n]) * n :]
            row.extend(block_id * n + part for block_id in block_ids for part in range(n))

    def block_table(self, g: int, step: ScheduleStep, batch: Batch) -> Array:
        """Gathered table [batch entries, width] that group `g` must show."""
        table = np.zeros((len(batch.idx_mapping), self._widths[g]), np.int64)
        computed = batch.num_computed_tokens
        for entry, row in enumerate(batch.idx_mapping.tolist()):
            table[entry] = gathered_row(
                self._groups[g],
                self._rows[g].get(row, ()),
                self._widths[g],
                int(computed[row]) if batch.has_computed and 0 <= row < len(computed) else None,
                self._context_parallel,
            )
        return table

    def slots(self, g: int, step: ScheduleStep, batch: Batch) -> Array:
        """Slots [tokens] of group `g`."""
        group, counts = self._groups[g], self.outcomes[g]
        starts, positions = batch.query_start_loc.tolist(), batch.positions.tolist()
        slots = [PAD_SLOT_ID] * batch.num_tokens
        for entry, row in enumerate(batch.idx_mapping.tolist()):
            tokens = range(starts[entry], min(starts[entry + 1], batch.num_tokens))
            if row < 0:
                counts[Outcome.DUMMY if group.maps_slots else Outcome.STATE_GROUP] += len(tokens)
                continue
            columns = self._rows[g].get(row, ()) if row < self._num_rows else None
            replay_start = int(batch.replay_start[entry])
            replay_len = None if batch.replay_len is None else int(batch.replay_len[entry])
            for index in tokens:
                token = map_token(
                    group,
                    columns,
                    positions[index],
                    self._context_parallel,
                    replay_start,
                    self._replay_window,
                    replay_len,
                    self._null_block_id,
                )
                counts[token.outcome] += 1
                slots[index] = token.slot
        return np.array(slots, np.int64)
