"""Host-side rows: how many columns each request has filled, and writes waiting for the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fused_slots.block_ids import check_request, plain_ids, raise_over_capacity
from fused_slots.layout import TableLayout
from fused_slots.staging import StagedWrites, merge_runs

Int32Array = npt.NDArray[np.int32]


class HostRows:
    """Row lengths on the host and the writes staged since the last step.

    `num_columns` (int32 [G, max_num_reqs]) is the truth about filled columns; the device's copy
    follows when the staged writes are applied. Writes are kept as runs: ids of one group that one
    call appended to one row.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        self._num_groups = layout.num_groups
        self._max_num_reqs = layout.max_num_reqs
        self._columns_per_block = [group.columns_per_block for group in layout.groups]
        self._widths = list(layout.widths)
        self._max_block_ids = list(layout.max_block_ids)
        # One row's lengths lie together: an append reads and writes a few of them.
        self._lengths = np.zeros((layout.max_num_reqs, layout.num_groups), dtype=np.int32)
        self.num_columns: Int32Array = self._lengths.T
        # The same memory; a Python int goes in and out of it three times as fast.
        self._flat_lengths = self._lengths.reshape(-1).data
        self._generations: Int32Array = np.zeros(layout.max_num_reqs, dtype=np.int32)
        self.largest_ids = [0] * layout.num_groups
        """Per group, the largest allocation block id ever staged."""
        self.clear()

    @property
    def pending(self) -> bool:
        """Whether writes wait to be applied."""
        return bool(self._records)

    @property
    def staged_rows(self) -> frozenset[int]:
        """Rows with writes that wait to be applied."""
        return frozenset(self._records)

    def stage(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        redirect_to_null_block: bool,
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
        if (
            type(req_index) is not int
            or not 0 <= req_index < self._max_num_reqs
            or type(overwrite) is not bool
            or type(new_block_ids) not in (tuple, list)
            or len(new_block_ids) != self._num_groups
        ):
            check_request(self._layout, req_index, new_block_ids, overwrite)
        first = int(req_index) * self._num_groups
        lengths = self._flat_lengths
        runs: list[tuple[int, list[int], int, int]] = []
        for g, group_ids in enumerate(new_block_ids):
            if type(group_ids) is not list:
                group_ids = plain_ids(self._layout, req_index, g, group_ids)
            if not group_ids:
                continue
            if len(group_ids) == 1 and type(group_ids[0]) is int:
                smallest = largest = group_ids[0]
            else:
                # A bool or a float would pass the comparisons.
                if not _INT.issuperset(map(type, group_ids)):
                    group_ids = plain_ids(self._layout, req_index, g, group_ids)
                smallest, largest = min(group_ids), max(group_ids)
            if smallest < 0 or largest > self._max_block_ids[g]:
                plain_ids(self._layout, req_index, g, group_ids)
            begin = 0 if overwrite else lengths[first + g]
            end = begin + len(group_ids) * self._columns_per_block[g]
            if end > self._widths[g]:
                raise_over_capacity(self._layout, req_index, g, begin, end)
            runs.append((g, group_ids, end, largest))
        if overwrite:
            self._start_anew(int(req_index))
        elif not runs:
            return
        record = self._records.setdefault(int(req_index), len(self._records))
        for g, group_ids, end, largest in runs:
            if redirect_to_null_block:
                self._ids.extend([0] * len(group_ids))
            else:
                self._ids.extend(group_ids)
                if largest > self.largest_ids[g]:
                    self.largest_ids[g] = largest
            self._runs += (record, g, len(group_ids))
            lengths[first + g] = end

    def collect(self) -> StagedWrites:
        """The writes staged since `clear`; they stay pending until it is called."""
        rows = np.fromiter(self._records, dtype=np.int64, count=len(self._records))
        filled = self._lengths[rows]
        runs = np.array(self._runs, dtype=np.int64).reshape(-1, 3)
        ids = np.array(self._ids, dtype=np.int32)
        return merge_runs(rows, filled, runs, ids, self._columns_per_block, self._generations[rows])

    def clear(self) -> None:
        """Forget the staged writes: the device has them."""
        self._records: dict[int, int] = {}
        self._runs: list[int] = []
        self._ids = array("i")

    def _start_anew(self, req_index: int) -> None:
        """Empty a row; runs already staged for it are void."""
        self._lengths[req_index] = 0
        self._generations[req_index] += 1
        record = self._records.get(req_index)
        if record is None:
            return
        runs = np.array(self._runs, dtype=np.int32).reshape(-1, 3)
        alive = runs[:, 0] != record
        ids = np.array(self._ids, dtype=np.int32)[np.repeat(alive, runs[:, 2])]
        self._runs, self._ids = runs[alive].ravel().tolist(), array("i", ids.tobytes())


_INT = frozenset((int,))
