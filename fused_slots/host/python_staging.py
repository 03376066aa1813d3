"""The half of rows.py in Python, for installations without a compiler; it does as _staging.c."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fused_slots.host.block_ids import plain_request
from fused_slots.host.packet import pack_writes
from fused_slots.host.staging import merge_pieces
from fused_slots.layout import TableLayout

Int32Array = npt.NDArray[np.int32]


class PythonStaging:
    """Staged writes as pieces, one after another.

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
        self._forget()

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
        """int32 elements of the packet."""
        fields = self._max_num_reqs + len(self._records) * (2 + 3 * self._num_groups)
        n = self._columns_per_block
        pieces = zip(self._pieces[1::3], self._pieces[2::3], strict=True)
        zeros = int(self._zeros(list(self._records)).sum()) if self._cleared else 0
        return fields + zeros + sum(length * n[g] for g, length in pieces)

    def stage(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        redirect_to_null_block: bool,
    ) -> None:
        """See `fused_slots.host.staging.Staging.stage`."""
        redirect = bool(redirect_to_null_block)  # may raise, so before anything changes
        pieces = self._pieces_of(req_index, new_block_ids, overwrite)
        if pieces is None:
            req_index, new_block_ids, overwrite = self._plain(req_index, new_block_ids, overwrite)
            pieces = self._pieces_of(req_index, new_block_ids, overwrite)
            if pieces is None:
                raise RuntimeError("a request in plain form was not accepted")
        if overwrite:
            self._start_anew(req_index)
        elif not pieces:
            return
        self._append(req_index, pieces, redirect)

    def write(
        self,
        req_index: int,
        begins: Sequence[int],
        new_block_ids: Sequence[Sequence[int]],
        redirect_to_null_block: bool,
    ) -> None:
        """See `fused_slots.host.staging.Staging.write`."""
        redirect = bool(redirect_to_null_block)
        pieces = self._pieces_of(req_index, new_block_ids, False, begins)
        if pieces is None or not self._are_columns(req_index, begins):
            raise ValueError("a request in plain form was not accepted")
        if any(begin < length for begin, length in zip(begins, self._row(req_index), strict=True)):
            self._cut(req_index, begins)
        elif not pieces:
            return
        self._append(req_index, pieces, redirect)

    def clear_row(self, req_index: int) -> None:
        """See `fused_slots.host.staging.Staging.clear_row`."""
        if type(req_index) is not int or not 0 <= req_index < self._max_num_reqs:
            raise ValueError("no such row")
        self._start_anew(req_index)
        self._records.setdefault(req_index, len(self._records))
        self._cleared.add(req_index)

    def _are_columns(self, req_index: int, begins: Sequence[int]) -> bool:
        """Whether a row may be replaced from these columns on."""
        row, n = self._row(req_index), self._columns_per_block
        return all(
            0 <= begin <= end and begin % per_block == 0
            for begin, end, per_block in zip(begins, row, n, strict=True)
        )

    def _row(self, req_index: int) -> list[int]:
        return self._flat_lengths[
            req_index * self._num_groups : (req_index + 1) * self._num_groups
        ].tolist()

    def _append(
        self, req_index: int, pieces: list[tuple[int, Sequence[int], int, int]], redirect: bool
    ) -> None:
        first = req_index * self._num_groups
        lengths, largest_ids = self._flat_lengths, self._largest_ids
        record = self._records.setdefault(req_index, len(self._records))
        for g, group_ids, end, largest in pieces:
            if redirect:
                self._ids.extend([0] * len(group_ids))
            else:
                self._ids.extend(group_ids)
                if largest > largest_ids[g]:
                    largest_ids[g] = largest
            self._pieces += (record, g, len(group_ids))
            lengths[first + g] = end
        for g in self._state_groups:
            if lengths[first + g] > self._flat_cells[first + g]:
                self._flat_cells[first + g] = lengths[first + g]

    def pack(self, packet: Int32Array) -> int:
        """See `fused_slots.host.staging.Staging.pack`."""
        rows = np.fromiter(self._records, dtype=np.int64, count=len(self._records))
        filled = self._lengths[rows]
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 3)
        ids = np.array(self._ids, dtype=np.int32)
        generations = self._generations[rows]
        writes = merge_pieces(rows, filled, pieces, ids, self._columns_per_block, generations)
        if self._cleared:
            writes = writes.with_zeros(self._zeros(rows.tolist()))
        return pack_writes(writes, self._layout, packet)

    def clear(self) -> None:
        """Forget the staged writes."""
        for row in self._cleared:
            self._cells[row, self._zeros([row])[0] > 0] = 0
        self._forget()

    def _forget(self) -> None:
        self._records: dict[int, int] = {}
        self._cleared: set[int] = set()
        self._pieces: list[int] = []
        self._ids = array("i")

    def _pieces_of(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        begins: Sequence[int] | None = None,
    ) -> list[tuple[int, Sequence[int], int, int]] | None:
        """A call's pieces as (group, ids, columns filled behind them, largest id).

        None: it is not in plain form, or wrong.
        """
        if (
            type(req_index) is not int
            or not 0 <= req_index < self._max_num_reqs
            or type(overwrite) is not bool
            or type(new_block_ids) not in _LISTS
            or len(new_block_ids) != self._num_groups
        ):
            return None
        first, lengths = req_index * self._num_groups, self._flat_lengths
        pieces: list[tuple[int, Sequence[int], int, int]] = []
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

    def _zeros(self, rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """int64 [len(rows), G], cells that become zero: of state rows given back and empty."""
        zeros = np.zeros((len(rows), self._num_groups), dtype=np.int64)
        staged = set(zip(self._pieces[::3], self._pieces[1::3], strict=True))
        for j, row in enumerate(rows):
            for g in self._state_groups if row in self._cleared else ():
                # A caller may have emptied the row behind staged ids: then these are written.
                if not self._lengths[row, g] and (self._records[row], g) not in staged:
                    zeros[j, g] = self._cells[row, g]
        return zeros

    def _cut(self, req_index: int, begins: Sequence[int]) -> None:
        """Shorten a row to these columns; staged ids from there on are void."""
        self._generations[req_index : req_index + 1] += 1  # of an array, it wraps without a warning
        record = self._records.setdefault(req_index, len(self._records))
        staged = dict.fromkeys(range(self._num_groups), 0)
        for place in range(0, len(self._pieces), 3):
            if self._pieces[place] == record:
                staged[self._pieces[place + 1]] += self._pieces[place + 2]
        kept: dict[int, int] = {}
        for g, begin in enumerate(begins):
            n, length = self._columns_per_block[g], int(self._lengths[req_index, g])
            kept[g] = max(begin - (length - staged[g] * n), 0) // n
            self._lengths[req_index, g] = begin
        pieces, ids, at = self._pieces, self._ids, 0
        self._pieces, self._ids = [], array("i")
        for place in range(0, len(pieces), 3):
            owner, g, length = pieces[place : place + 3]
            left = length
            if owner == record:
                left = min(length, kept[g])
                kept[g] -= left
            if left:
                self._pieces += (owner, g, left)
                self._ids.extend(ids[at : at + left])
            at += length

    def _start_anew(self, req_index: int) -> None:
        """Empty a row; pieces already staged for it are void."""
        self._lengths[req_index] = 0
        self._generations[req_index : req_index + 1] += 1  # of an array, it wraps without a warning
        record = self._records.get(req_index)
        if record is None:
            return
        pieces = np.array(self._pieces, dtype=np.int32).reshape(-1, 3)
        alive = pieces[:, 0] != record
        ids = np.array(self._ids, dtype=np.int32)[np.repeat(alive, pieces[:, 2])]
        self._pieces, self._ids = pieces[alive].ravel().tolist(), array("i", ids.tobytes())


_INT = frozenset((int,))
_LISTS = frozenset((list, tuple))
