"""The half of rows.py in Python, for installations without a compiler; it does as _staging.c."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from fused_slots.host.block_ids import plain_request
from fused_slots.host.packet import pack_writes
from fused_slots.host.staging import StagedWrites, split_blocks
from fused_slots.layout import TableLayout

Int32Array = npt.NDArray[np.int32]
_Pieces = list[tuple[int, Sequence[int], int, int]]
"""What a call appends: group, ids, columns filled behind them, largest id."""

_INT = frozenset((int,))
_LISTS = frozenset((list, tuple))


class PythonStaging:
    """One manager's staged writes: a record for each written row, with the ids of each group.

    Args:
        layout: the manager's sizes.
        lengths: int32 [max_num_reqs, G], filled columns; kept up to date.
        generations: int32 [max_num_reqs], how often each row was started anew; likewise.
        largest_ids: int32 [G], the largest allocation block id ever staged; likewise.
        cells: int32 [max_num_reqs, G], cells of state rows that may hold an id; likewise.
    """

    def __init__(
        self,
        layout: TableLayout,
        lengths: Int32Array,
        generations: Int32Array,
        largest_ids: Int32Array,
        cells: Int32Array,
    ) -> None:
        self._layout = layout
        self._num_groups = layout.num_groups
        self._max_num_reqs = layout.max_num_reqs
        self._columns_per_block = [group.columns_per_block for group in layout.groups]
        self._widths = list(layout.widths)
        self._max_block_ids = list(layout.max_block_ids)
        self._plain = partial(plain_request, layout, lengths)
        self._lengths = lengths
        self._generations = generations
        # The same memory; a Python int goes in and out of it three times as fast.
        self._flat_lengths = lengths.reshape(-1).data
        self._largest_ids = largest_ids.data
        self._cells, self._flat_cells = cells, cells.reshape(-1).data
        self._state_groups = [g for g, group in enumerate(layout.groups) if not group.maps_slots]
        self._records: dict[int, list[list[int]]] = {}
        """By row, in the order of their first calls: per group the ids that were appended."""
        self._cleared: set[int] = set()
        self.num_calls = 0
        """Calls that changed a row, since construction."""

    @property
    def pending(self) -> bool:
        """Whether writes are staged."""
        return bool(self._records)

    @property
    def rows(self) -> list[int]:
        """Rows with staged writes, in the order of their first calls."""
        return list(self._records)

    @property
    def num_rows(self) -> int:
        """The number of `rows`."""
        return len(self._records)

    @property
    def packet_size(self) -> int:
        """int32 elements of the packet that `pack` writes."""
        fields = self._max_num_reqs + len(self._records) * (2 + 3 * self._num_groups)
        return fields + int((self._counts() + self._zeros()).sum())

    def stage(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
    ) -> None:
        """Stage one request's new blocks, for all groups or for none.

        Args:
            req_index: the request's row.
            new_block_ids: per group, allocation block ids to append to the row.
            overwrite: start the row anew instead.

        Raises:
            InvalidArgumentError: the row, the number of groups or overwrite is wrong.
            BlockIdError: an id is not an int the group accepts.
            RowCapacityError: a row would hold more columns than it has.
        """
        pieces = self._pieces_of(req_index, new_block_ids, overwrite)
        if pieces is None:
            req_index, new_block_ids, overwrite = self._plain(req_index, new_block_ids, overwrite)
            pieces = self._pieces_of(req_index, new_block_ids, overwrite)
            if pieces is None:
                raise RuntimeError("a request in plain form was not accepted")
        self.num_calls += 1
        if overwrite:
            self._start_anew(req_index)
        elif not pieces:
            return
        self._append(req_index, pieces)

    def write(
        self, req_index: int, begins: Sequence[int], new_block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Stage a row's blocks from a column on, for all groups or for none.

        Args:
            req_index: the request's row.
            begins: per group the column, a multiple of n up to the row's end.
            new_block_ids: per group, the allocation block ids that the row ends with.

        Raises:
            ValueError: it is not in plain form (lists of ints), or wrong: see `block_ids`.
        """
        pieces = self._pieces_of(req_index, new_block_ids, False, begins)
        if pieces is None or not self._are_columns(req_index, begins):
            raise ValueError("a request in plain form was not accepted")
        self.num_calls += 1
        if any(begin < length for begin, length in zip(begins, self._row(req_index), strict=True)):
            self._cut(req_index, begins)
        elif not pieces:
            return
        self._append(req_index, pieces)

    def clear_row(self, req_index: int) -> None:
        """Empty a row; where kernels read its cells whatever its length, those become zero.

        Raises:
            ValueError: it is not in plain form, or no row.
        """
        if type(req_index) is not int or not 0 <= req_index < self._max_num_reqs:
            raise ValueError("no such row")
        self.num_calls += 1
        self._start_anew(req_index)
        self._record(req_index)
        self._cleared.add(req_index)

    def pack(self, packet: Int32Array) -> int:
        """Write the merged writes as fused_slots/host/packet.py says; they stay staged.

        Args:
            packet: int32, contiguous, at least `packet_size` long.

        Returns:
            Columns of the longest record.

        Raises:
            ValueError: the packet is too small.
        """
        rows = np.fromiter(self._records, dtype=np.int64, count=len(self._records))
        staged = chain.from_iterable(chain.from_iterable(self._records.values()))
        ids, counts = np.fromiter(staged, dtype=np.int32), self._counts()
        n = np.array(self._columns_per_block, dtype=np.int64)
        writes = StagedWrites(
            rows=rows,
            filled=self._lengths[rows],
            counts=counts,
            offsets=(np.cumsum(counts) - counts.ravel()).reshape(counts.shape),
            column_ids=split_blocks(ids, counts, n) if (n > 1).any() else ids,
            generations=self._generations[rows],
        )
        if self._cleared:
            writes = writes.with_zeros(self._zeros())
        return pack_writes(writes, self._layout, packet)

    def clear(self) -> None:
        """Forget the staged writes."""
        if self._cleared:
            rows = np.fromiter(self._records, dtype=np.int64, count=len(self._records))
            self._cells[rows] -= self._zeros().astype(np.int32)
        self._records.clear()
        self._cleared.clear()

    def _counts(self) -> npt.NDArray[np.int64]:
        """int64 [records, G], columns that are staged."""
        shape = (len(self._records), self._num_groups)
        lengths = map(len, chain.from_iterable(self._records.values()))
        counts = np.fromiter(lengths, np.int64, count=shape[0] * shape[1]).reshape(shape)
        return counts * np.array(self._columns_per_block, np.int64)

    def _zeros(self) -> npt.NDArray[np.int64]:
        """int64 [records, G], cells that become zero: of state rows given back and empty."""
        zeros = np.zeros((len(self._records), self._num_groups), dtype=np.int64)
        for record, (row, lists) in enumerate(self._records.items() if self._cleared else ()):
            for g in self._state_groups if row in self._cleared else ():
                # A caller may have emptied the row behind staged ids: then these are written.
                if not self._lengths[row, g] and not lists[g]:
                    zeros[record, g] = self._cells[row, g]
        return zeros

    def _pieces_of(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        begins: Sequence[int] | None = None,
    ) -> _Pieces | None:
        """What a call appends; None: it is not in plain form, or wrong."""
        if (
            type(req_index) is not int
            or not 0 <= req_index < self._max_num_reqs
            or type(overwrite) is not bool
            or type(new_block_ids) not in _LISTS
            or len(new_block_ids) != self._num_groups
        ):
            return None
        first, lengths = req_index * self._num_groups, self._flat_lengths
        pieces: _Pieces = []
        for g, group_ids in enumerate(new_block_ids):
            if type(group_ids) not in _LISTS:
                return None
            if not group_ids:
                continue
            if len(group_ids) == 1 and type(group_ids[0]) is int:
                smallest = largest = group_ids[0]
            else:
                # A bool or a float would pass the comparisons.
                if not _INT.issuperset(map(type, group_ids)):
                    return None
                smallest, largest = min(group_ids), max(group_ids)
            if smallest < 0 or largest > self._max_block_ids[g]:
                return None
            begin = 0 if overwrite else begins[g] if begins else lengths[first + g]
            end = begin + len(group_ids) * self._columns_per_block[g]
            if end > self._widths[g]:
                return None
            pieces.append((g, group_ids, end, largest))
        return pieces

    def _are_columns(self, req_index: int, begins: Sequence[int]) -> bool:
        """Whether a row may be replaced from these columns on."""
        row, n = self._row(req_index), self._columns_per_block
        return all(
            0 <= begin <= end and begin % per_block == 0
            for begin, end, per_block in zip(begins, row, n, strict=True)
        )

    def _row(self, req_index: int) -> list[int]:
        return self._lengths[req_index].tolist()  # type: ignore[no-any-return]

    def _record(self, req_index: int) -> list[list[int]]:
        record = self._records.get(req_index)
        if record is None:
            record = self._records[req_index] = [[] for _ in self._widths]
        return record

    def _append(self, req_index: int, pieces: _Pieces) -> None:
        first, record = req_index * self._num_groups, self._record(req_index)
        lengths, largest_ids = self._flat_lengths, self._largest_ids
        for g, group_ids, end, largest in pieces:
            record[g].extend(group_ids)
            if largest > largest_ids[g]:
                largest_ids[g] = largest
            lengths[first + g] = end
        for g in self._state_groups:
            if lengths[first + g] > self._flat_cells[first + g]:
                self._flat_cells[first + g] = lengths[first + g]

    def _cut(self, req_index: int, begins: Sequence[int]) -> None:
        """Shorten a row to these columns; staged ids from there on are void."""
        self._generations[req_index : req_index + 1] += 1  # of an array, it wraps without a warning
        record, row = self._record(req_index), self._row(req_index)
        for ids, n, length, begin in zip(record, self._columns_per_block, row, begins, strict=True):
            del ids[max(begin - (length - len(ids) * n), 0) // n :]
        self._lengths[req_index] = begins

    def _start_anew(self, req_index: int) -> None:
        """Empty a row; ids already staged for it are void."""
        self._lengths[req_index] = 0
        self._generations[req_index : req_index + 1] += 1  # of an array, it wraps without a warning
        if req_index in self._records:
            self._records[req_index] = [[] for _ in self._widths]
