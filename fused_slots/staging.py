"""One step's writes as records: what changed in each row, merged so that no two writes overlap.

However many appends and overwrites a row got since the last step, each group's part of it becomes
one record: columns from `start` on now hold these ids. Columns before `start` are untouched, so a
reader can take those from the table and the others from the record while the table is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_slots.layout import TableLayout

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StagedWrites:
    """The merged writes of one step to J rows in all G groups.

    Args:
        rows: int64 [J], each row once.
        starts: int64 [J, G], first column that changed; 0 after an overwrite.
        filled: int64 [J, G], columns the row holds afterwards.
        offsets: int64 [J, G], where the record's ids begin in `column_ids`.
        column_ids: int32 [M], kernel block ids, record after record in [J, G] order.
        generations: int32 [J], how often each row was started anew.
    """

    rows: Int64Array
    starts: Int64Array
    filled: Int64Array
    offsets: Int64Array
    column_ids: Int32Array
    generations: Int32Array

    def destinations(self, layout: TableLayout) -> Int64Array:
        """int64 [M], the element of the tables' arena that each of `column_ids` goes to."""
        offsets = np.array(layout.offsets[: layout.num_groups], dtype=np.int64)
        widths = np.array(layout.widths, dtype=np.int64)
        first = offsets + self.rows[:, None] * widths + self.starts
        return _ranges(first.ravel(), (self.filled - self.starts).ravel())


def merge_writes(
    rows: Int64Array,
    overwrites: npt.NDArray[np.bool_],
    lengths: Int64Array,
    begins: Int64Array,
    block_ids: Int32Array,
    columns_per_block: Int64Array,
    generations: Int32Array,
) -> StagedWrites:
    """Merge calls in the order in which they were made into one record per row and group.

    Args:
        rows: int64 [C], the row of each call.
        overwrites: bool [C], whether the call started the row anew.
        lengths: int64 [C, G], allocation blocks that the call brought.
        begins: int64 [C, G], columns that the row held before it (0 if it overwrote).
        block_ids: int32, allocation block ids, call after call and group after group.
        columns_per_block: int64 [G], n.
        generations: int32 [max_num_reqs], how often each row was started anew.
    """
    run_begins = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    unique_rows, first_calls = np.unique(rows, return_index=True)
    if len(unique_rows) == len(rows):
        starts, ids, counts = begins, block_ids, lengths * columns_per_block
        unique_rows = rows
    else:
        alive = _survives_overwrites(rows, overwrites)
        rows, lengths, begins = rows[alive], lengths[alive], begins[alive]
        unique_rows, first_calls, rank = np.unique(rows, return_index=True, return_inverse=True)
        starts = begins[first_calls]
        # Runs of one row and group become neighbours, in the order of their calls.
        calls, groups = np.indices(lengths.shape)
        order = np.lexsort((calls.ravel(), groups.ravel(), rank[calls].ravel()))
        run_lengths = lengths.ravel()[order]
        ids = block_ids[_ranges(run_begins[alive].ravel()[order], run_lengths)]
        merged = np.zeros(starts.shape, dtype=np.int64)
        np.add.at(merged, rank, lengths)
        lengths, counts = merged, merged * columns_per_block
    n = np.repeat(np.broadcast_to(columns_per_block, lengths.shape).ravel(), lengths.ravel())
    return StagedWrites(
        rows=unique_rows,
        starts=starts,
        filled=starts + counts,
        offsets=(np.cumsum(counts) - counts.ravel()).reshape(counts.shape),
        column_ids=_split_blocks(ids, n),
        generations=generations[unique_rows],
    )


def _survives_overwrites(
    rows: Int64Array, overwrites: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which calls no later overwrite of the same row makes void."""
    calls = np.arange(len(rows))
    last_overwrite = np.zeros(int(rows.max()) + 1, dtype=np.int64)
    np.maximum.at(last_overwrite, rows[overwrites], calls[overwrites])
    alive: npt.NDArray[np.bool_] = calls >= last_overwrite[rows]
    return alive


def _split_blocks(block_ids: Int32Array, n: Int64Array) -> Int32Array:
    """Each allocation block k as its n columns k·n ... k·n + n - 1."""
    if not len(n) or n.max() == 1:
        return block_ids
    columns: Int32Array = _ranges(block_ids * n, n).astype(np.int32)
    return columns


def _ranges(begins: npt.NDArray[Any], lengths: Int64Array) -> Int64Array:
    """The numbers begins[i], begins[i] + 1, ... (lengths[i] of them), range after range."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    values: Int64Array = np.repeat(begins - (ends - lengths), lengths)
    values += np.arange(total, dtype=np.int64)
    return values
