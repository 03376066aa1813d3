"""A second oracle: the mapping in vectorised NumPy, derived another way than the scalar reference.

It shares no code with the package (it reads the group's plain fields alone). Where the reference
walks v, w, owner and local, this one numbers the tokens of a rank: with interleave I dividing the
block size, the tokens of one rank are its own in stripes of I, so token p of its owner is that
rank's token number q = p // (S*I) * I + p mod I, and then column q // B, offset q mod B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PAD = -1


class MappedBatch(NamedTuple):
    """Slots int64 [G, capacity], and per group the tokens that fault, by reason."""

    slots: Array
    column_out_of_row: Array
    empty_ring: Array
    row_out_of_range: Array
    null_block: Array


def token_rows(idx_mapping: Array, query_start_loc: Array, capacity: int) -> tuple[Array, Array]:
    """The row and the batch entry of every token below the capacity."""
    ends = np.asarray(query_start_loc[1 : len(idx_mapping) + 1], dtype=np.int64)
    num_tokens = min(int(ends[-1]) if len(ends) else 0, capacity)
    entries = np.searchsorted(ends, np.arange(num_tokens), side="right")
    return np.asarray(idx_mapping, dtype=np.int64)[entries], entries


def map_tokens(
    groups: Sequence[Any],
    tables: Sequence[Array],
    lengths: Sequence[Array],
    rows: Array,
    positions: Array,
    capacity: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleave: int = 1,
    replay_start: Array | None = None,
    replay_window: int = 0,
    replay_len: Array | None = None,
    null_block_id: int | None = None,
) -> MappedBatch:
    """Slots of (row, position) pairs, padded to the capacity.

    Args:
        groups: the KV cache groups; only their plain fields are read.
        tables: per group int64 [R, width].
        lengths: per group [R], filled columns.
        rows: [T], -1 = dummy, >= R = out of range.
        positions: [T].
        capacity: columns of the result, >= T.
        cp_size: context parallel ranks.
        cp_rank: this rank.
        interleave: consecutive tokens on a rank.
        replay_start: [T], by token; None = no replay.
        replay_window: replayed tokens.
        replay_len: [T], by token, instead of the window; None = the window.
        null_block_id: the allocation block that is never written; None = there is none.
    """
    num_tokens, num_groups = len(rows), len(groups)
    slots = np.full((num_groups, capacity), PAD, dtype=np.int64)
    faults = np.zeros((4, num_groups), dtype=np.int64)
    if not num_tokens:
        return MappedBatch(slots, *faults)
    positions = np.asarray(positions, dtype=np.int64)
    num_rows = len(lengths[0]) if num_groups else 0
    unknown = rows >= num_rows
    lives = (rows >= 0) & ~unknown & (positions >= 0)
    row = np.where(lives, rows, 0)
    position = np.where(lives, positions, 0)
    replayed = np.zeros(num_tokens, dtype=bool)
    if replay_start is not None and replay_len is not None:
        # Numbers that every sum of theirs fits.
        last = replay_start.astype(object) + replay_len - 1
        replayed = (replay_start <= position) & (position <= last).astype(bool)
    elif replay_start is not None:
        replayed = (replay_start != 0) & (position >= replay_start)
        replayed &= position.astype(object) - replay_start < replay_window
    for g, group in enumerate(groups):
        if group.slot_mapping_mode.name == "NONE":
            continue
        faults[2, g] = np.count_nonzero(unknown)
        wanted = lives & ~replayed if group.prefix_cacheable else lives
        size = group.kernel_block_size
        if group.circular:
            ordinal, mine = position % size, np.ones(num_tokens, dtype=bool)
        elif group.dcp_sharded and cp_size > 1:
            ordinal = position // (cp_size * interleave) * interleave + position % interleave
            mine = position // interleave % cp_size == cp_rank
        else:
            ordinal, mine = position, np.ones(num_tokens, dtype=bool)
        column, offset = np.divmod(ordinal, size)
        filled = column < lengths[g][row]
        faults[1 if group.circular else 0, g] = np.count_nonzero(wanted & mine & ~filled)
        written = np.flatnonzero(wanted & mine & filled)
        ids = tables[g][row[written], column[written]]
        columns_per_block = group.block_size // size
        null = np.zeros(len(ids), dtype=bool)
        if null_block_id is not None:
            first = null_block_id * columns_per_block
            null = (ids >= first) & (ids < first + columns_per_block)
        faults[3, g] = np.count_nonzero(null)
        slots[g, written] = np.where(null, PAD, ids * size + offset[written])
    return MappedBatch(slots, *faults)


def gather(
    group: Any,
    table: Array,
    lengths: Array,
    idx_mapping: Array,
    num_reqs_padded: int,
    num_computed_tokens: Array | None = None,
    cp_size: int = 1,
) -> Array:
    """Gathered rows of one group, int64 [num_reqs_padded, width]."""
    result = np.zeros((num_reqs_padded, table.shape[1]), dtype=np.int64)
    entries = np.flatnonzero((idx_mapping >= 0) & (idx_mapping < len(lengths)))
    rows = idx_mapping[entries]
    column = np.arange(table.shape[1])[None, :]
    live = column < lengths[rows][:, None]
    reach = group.sliding_window_reach
    if num_computed_tokens is not None and reach and cp_size == 1:
        first = num_computed_tokens[rows].astype(np.int64) - reach
        # A column is read when its last token is at or above the first readable one.
        live &= (column + 1) * group.kernel_block_size > np.maximum(first, 0)[:, None]
    result[entries] = np.where(live, table[rows], 0)
    return result
