"""One step's writes as records: what changed in each row, merged so that no two writes overlap.

However many appends and overwrites a row got since the last step, it has one record, which says in
each group: columns from `start` on now hold these ids. Columns before `start` are untouched, so a
reader can take those from the table and the others from the record while the table is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fused_slots.layout import TableLayout

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Staging(Protocol):
    """One manager's staged writes: what `HostRows` asks of its native half and of the other.

    Both keep the row lengths, generations and largest ids up to date in arrays of `HostRows`.
    """

    @property
    def pending(self) -> bool:
        """Whether writes are staged."""

    @property
    def rows(self) -> list[int]:
        """Rows with staged writes, in the order of their first calls."""

    @property
    def num_rows(self) -> int:
        """The number of `rows`."""

    @property
    def packet_size(self) -> int:
        """int32 elements of the packet that `pack` writes."""

    def stage(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        redirect_to_null_block: bool,
        /,
    ) -> None:
        """Stage one request's new blocks, for all groups or for none.

        Args:
            req_index: the request's row.
            new_block_ids: per group, allocation block ids to append to the row.
            overwrite: start the row anew instead.
            redirect_to_null_block: stage the null block in place of every id.

        Raises:
            InvalidArgumentError: the row, the number of groups or overwrite is wrong.
            BlockIdError: an id is not an int the group accepts.
            RowCapacityError: a row would hold more columns than it has.
        """

    def write(
        self,
        req_index: int,
        begins: Sequence[int],
        new_block_ids: Sequence[Sequence[int]],
        redirect_to_null_block: bool,
        /,
    ) -> None:
        """Stage a row's blocks from a column on, for all groups or for none.

        Args:
            req_index: the request's row.
            begins: per group the column, a multiple of n up to the row's end.
            new_block_ids: per group, the allocation block ids that the row ends with.
            redirect_to_null_block: stage the null block in place of every id.

        Raises:
            ValueError: it is not in plain form (lists of ints), or wrong: see `block_ids`.
        """

    def clear_row(self, req_index: int, /) -> None:
        """Empty a row; where kernels read its cells whatever its length, those become zero.

        Raises:
            ValueError: it is not in plain form, or no row.
        """

    def pack(self, packet: Int32Array, /) -> int:
        """Write the merged writes as fused_slots/host/packet.py says; they stay staged.

        Args:
            packet: int32, contiguous, at least `packet_size` long.

        Returns:
            Columns of the longest record.

        Raises:
            ValueError: the packet is too small.
        """

    def clear(self) -> None:
        """Forget the staged writes."""


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
        """The same with so many zeros, int64 [J, G], in places that hold no ids."""
        counts = self.counts + zeros
        places = np.repeat(self.offsets.ravel(), zeros.ravel())
        return replace(
            self,
            counts=counts,
            offsets=(np.cumsum(counts) - counts.ravel()).reshape(counts.shape),
            column_ids=np.insert(self.column_ids, places, 0),
        )

    def destinations(self, layout: TableLayout) -> Int64Array:
        """int64 [M], the element of the tables' arena that each of `column_ids` goes to."""
        offsets = np.array(layout.offsets[: layout.num_groups], dtype=np.int64)
        widths = np.array(layout.widths, dtype=np.int64)
        first = offsets + self.rows[:, None] * widths + np.maximum(self.starts, 0)
        return _ranges(first.ravel(), self.counts.ravel())


def merge_pieces(
    rows: Int64Array,
    filled: Int32Array,
    pieces: Int64Array,
    block_ids: Int32Array,
    columns_per_block: Sequence[int],
    generations: Int32Array,
) -> StagedWrites:
    """Merge pieces, in the order in which they were staged, into one record per row and group.

    Args:
        rows: int64 [J], the row of each record.
        filled: int32 [J, G], columns that each row holds with all pieces.
        pieces: int64 [C, 3], record, group and number of ids of each piece.
        block_ids: int32, the pieces' allocation block ids, piece after piece.
        columns_per_block: n of each group.
        generations: int32 [J], how often each row was started anew.
    """
    num_records, num_groups = filled.shape
    places, lengths = pieces[:, 0] * num_groups + pieces[:, 1], pieces[:, 2]
    n = np.array(columns_per_block, dtype=np.int64)
    in_order = not (places[1:] <= places[:-1]).any()
    if not in_order:
        # A row was appended to again: its pieces become neighbours, in the order of their calls.
        order = np.argsort(places, kind="stable")
        begins = np.cumsum(lengths) - lengths
        block_ids = block_ids[_ranges(begins[order], lengths[order])]
        places, lengths = places[order], lengths[order]
    per_piece = n[places % num_groups] if num_groups else lengths
    counts = np.zeros(num_records * num_groups, dtype=np.int64)
    if in_order:
        counts[places] = lengths * per_piece
    else:
        np.add.at(counts, places, lengths * per_piece)
    return StagedWrites(
        rows=rows,
        filled=filled,
        counts=counts.reshape(num_records, num_groups),
        offsets=(np.cumsum(counts) - counts).reshape(num_records, num_groups),
        column_ids=_split_blocks(block_ids, lengths, per_piece, max(columns_per_block, default=1)),
        generations=generations,
    )


def _split_blocks(
    block_ids: Int32Array, lengths: Int64Array, per_piece: Int64Array, most: int
) -> Int32Array:
    """Each allocation block k as its n columns k·n ... k·n + n - 1."""
    if most == 1:
        return block_ids
    n = np.repeat(per_piece, lengths)
    columns: Int32Array = _ranges(block_ids * n, n).astype(np.int32)
    return columns


def _ranges(begins: npt.NDArray[Any], lengths: Int64Array) -> Int64Array:
    """The numbers begins[i], begins[i] + 1, ... (lengths[i] of them), range after range."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    values: Int64Array = np.repeat(begins - (ends - lengths), lengths)
    values += np.arange(total, dtype=np.int64)
    return values
