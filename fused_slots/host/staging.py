"""One step's writes as records: what changed in each row, merged so that no two writes overlap.

However many appends and overwrites a row got since the last step, it has one record, which says in
each group: columns from `start` on now hold these ids. Columns before `start` are untouched, so a
reader can take those from the table and the others from the record while the table is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        filled: int32 [J, G], columns the row holds afterwards.
        counts: int64 [J, G], how many of them, the last ones, are new; or, of an empty row that
            was given back, how many of its first cells become zero.
        offsets: int64 [J, G], where the record's ids begin in `column_ids`.
        column_ids: int32 [M], kernel block ids, record after record in [J, G] order.
        generations: int32 [J], how often each row was started anew.
    """

    rows: Int64Array
    filled: Int32Array
    counts: Int64Array
    offsets: Int64Array
    column_ids: Int32Array
    generations: Int32Array

    @property
    def starts(self) -> Int64Array:
        """int64 [J, G], first column that changed; 0 after an overwrite, negative if cleared."""
        return self.filled - self.counts

    def with_zeros(self, zeros: Int64Array) -> StagedWrites:
        """The same with so many zeros, int64 [J, G], where no ids are."""
        counts = self.counts + zeros
        before = np.repeat(self.offsets.ravel(), zeros.ravel())
        return replace(
            self,
            counts=counts,
            offsets=(np.cumsum(counts) - counts.ravel()).reshape(counts.shape),
            column_ids=np.insert(self.column_ids, before, 0),
        )

    def destinations(self, layout: TableLayout) -> Int64Array:
        """int64 [M], the element of the tables' arena that each of `column_ids` goes to."""
        offsets = np.array(layout.offsets[: layout.num_groups], dtype=np.int64)
        widths = np.array(layout.widths, dtype=np.int64)
        first = offsets + self.rows[:, None] * widths + np.maximum(self.starts, 0)
        return _ranges(first.ravel(), self.counts.ravel())


def split_blocks(block_ids: Int32Array, counts: Int64Array, n: Int64Array) -> Int32Array:
    """Each allocation block k as its n columns k·n ... k·n + n - 1.

    Args:
        block_ids: int32, record after record in [J, G] order.
        counts: int64 [J, G], columns of each record and group.
        n: int64 [G].
    """
    per_record = np.broadcast_to(n, counts.shape).ravel()
    per_block = np.repeat(per_record, counts.ravel() // per_record)
    columns: Int32Array = _ranges(block_ids * per_block, per_block).astype(np.int32)
    return columns


def _ranges(begins: npt.NDArray[Any], lengths: Int64Array) -> Int64Array:
    """The numbers begins[i], begins[i] + 1, ... (lengths[i] of them), range after range."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    values: Int64Array = np.repeat(begins - (ends - lengths), lengths)
    values += np.arange(total, dtype=np.int64)
    return values
