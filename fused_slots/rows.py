"""Host-side rows: how many columns each request has filled, and writes waiting for the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fused_slots.faults import (
    INT32_MAX,
    BlockIdError,
    InvalidArgumentError,
    RowCapacityError,
)
from fused_slots.layout import TableLayout
from fused_slots.staging import StagedWrites, merge_writes

Int32Array = npt.NDArray[np.int32]

_PLAIN_TYPES = frozenset((list, tuple, np.ndarray, array, range))


class HostRows:
    """Row lengths on the host and the writes staged since the last step.

    `num_columns` (int32 [G, max_num_reqs]) is the truth about filled columns; the device's copy
    follows when the staged writes are applied.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        self._columns_per_block = [group.columns_per_block for group in layout.groups]
        self._max_block_ids = list(layout.max_block_ids)
        self.num_columns: Int32Array = np.zeros(
            (layout.num_groups, layout.max_num_reqs), dtype=np.int32
        )
        self._generations: Int32Array = np.zeros(layout.max_num_reqs, dtype=np.int32)
        self.largest_ids = [0] * layout.num_groups
        """Per group, the largest allocation block id ever staged."""
        self.clear()

    @property
    def pending(self) -> bool:
        """Whether writes wait to be applied."""
        return bool(self._rows)

    @property
    def staged_rows(self) -> frozenset[int]:
        """Rows with writes that wait to be applied."""
        return frozenset(self._rows)

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
            InvalidArgumentError: the row or the number of groups is wrong.
            BlockIdError: an id is not an int the group accepts.
            RowCapacityError: a row would hold more columns than it has.
        """
        self._check_request(req_index, new_block_ids, overwrite)
        ids, largest_ids = self._checked_ids(req_index, new_block_ids)
        if not ids and not overwrite:
            return
        lengths = [len(group_ids) for group_ids in new_block_ids]
        begins = [0] * len(lengths) if overwrite else self.num_columns[:, req_index].tolist()
        ends = [
            begin + length * n
            for begin, length, n in zip(begins, lengths, self._columns_per_block, strict=True)
        ]
        for g, (end, width) in enumerate(zip(ends, self._layout.widths, strict=True)):
            if end > width:
                self._raise_over_capacity(req_index, g, begins[g], end)
        if redirect_to_null_block:
            ids = array("i", bytes(ids.itemsize * len(ids)))
        else:
            self.largest_ids = largest_ids
        self._ids.extend(ids)
        self._rows.append(int(req_index))
        self._overwrites.append(bool(overwrite))
        self._lengths.extend(lengths)
        self._begins.extend(begins)
        self._generations[req_index] += overwrite
        self.num_columns[:, req_index] = ends

    def collect(self) -> StagedWrites:
        """The writes staged since `clear`; they stay pending until it is called."""
        rows = np.array(self._rows, dtype=np.int64)
        shape = (len(rows), self._layout.num_groups)
        return merge_writes(
            rows,
            np.array(self._overwrites, dtype=np.bool_),
            np.array(self._lengths, dtype=np.int64).reshape(shape),
            np.array(self._begins, dtype=np.int64).reshape(shape),
            np.array(self._ids, dtype=np.int32),
            np.array(self._columns_per_block, dtype=np.int64),
            self._generations,
        )

    def clear(self) -> None:
        """Forget the staged writes: the device has them."""
        self._ids = array("i")
        self._rows: list[int] = []
        self._overwrites: list[bool] = []
        self._lengths: list[int] = []
        self._begins: list[int] = []

    def _check_request(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
    ) -> None:
        is_row = isinstance(req_index, (int, np.integer)) and not isinstance(req_index, bool)
        if not is_row or not 0 <= req_index < self._layout.max_num_reqs:
            raise InvalidArgumentError(
                "req_index",
                expected=f"a row in [0, {self._layout.max_num_reqs})",
                actual=repr(req_index),
                hint="max_num_reqs sets the number of rows",
            )
        if not isinstance(overwrite, (bool, np.bool_)):
            raise InvalidArgumentError(
                "overwrite", expected="True or False", actual=repr(overwrite)
            )
        if type(new_block_ids) not in (list, tuple) and not _is_list(new_block_ids):
            self._raise_not_lists(req_index, type(new_block_ids).__name__)
        if len(new_block_ids) != self._layout.num_groups:
            self._raise_not_lists(req_index, str(len(new_block_ids)))

    def _raise_not_lists(self, req_index: int, actual: str) -> NoReturn:
        raise InvalidArgumentError(
            f"new_block_ids of request row {req_index}",
            expected=f"{self._layout.num_groups} lists, one per KV cache group",
            actual=actual,
        )

    def _checked_ids(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]]
    ) -> tuple[array[int], list[int]]:
        """All groups' ids one behind the other, and the largest ids ever with these among them."""
        try:
            # `array` takes True for 1, and the elements of a tensor or of a set's random order.
            if _PLAIN_TYPES.issuperset(map(type, new_block_ids)) and bool not in map(
                type, chain.from_iterable(new_block_ids)
            ):
                return array("i", chain.from_iterable(new_block_ids)), self._largest(new_block_ids)
        except (TypeError, ValueError, OverflowError):
            pass  # found again below, with its place
        lists = self._checked_one_by_one(req_index, new_block_ids)
        return array("i", chain.from_iterable(lists)), self._largest(lists)

    def _largest(self, new_block_ids: Sequence[Sequence[int]]) -> list[int]:
        """The largest id ever staged, with these among them, per group.

        Raises:
            ValueError: an id is negative or too large for its group.
        """
        largest_ids = self.largest_ids.copy()
        for g, group_ids in enumerate(new_block_ids):
            if len(group_ids):
                largest = max(group_ids)
                if min(group_ids) < 0 or largest > self._max_block_ids[g]:
                    raise ValueError(g)
                if largest > largest_ids[g]:
                    largest_ids[g] = int(largest)
        return largest_ids

    def _checked_one_by_one(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The ids as Python ints; raises for the first that its group does not accept."""
        lists: list[list[int]] = []
        for g, group_ids in enumerate(new_block_ids):
            where = f"new_block_ids of request row {req_index}, {self._layout.describe(g)}"
            if not _is_list(group_ids):
                raise BlockIdError(
                    where, expected="a list of block ids", actual=type(group_ids).__name__
                )
            for place, block_id in enumerate(group_ids):
                is_int = isinstance(block_id, (int, np.integer)) and not isinstance(block_id, bool)
                if not is_int:
                    raise BlockIdError(
                        f"{where}, entry {place}", expected="an int", actual=repr(block_id)
                    )
                if not 0 <= block_id <= self._max_block_ids[g]:
                    raise BlockIdError(
                        f"{where}, entry {place}",
                        expected=f"a block id in [0, {self._max_block_ids[g]}]",
                        actual=str(block_id),
                        hint=self._why_refused(g, int(block_id)),
                    )
            lists.append([int(block_id) for block_id in group_ids])
        return lists

    def _why_refused(self, g: int, block_id: int) -> str:
        if 0 <= block_id <= INT32_MAX:
            return f"The limit comes from the group: {self._layout.block_id_limit(g)}"
        return "Block ids are non-negative int32 numbers"

    def _raise_over_capacity(self, req_index: int, g: int, begin: int, end: int) -> NoReturn:
        width = self._layout.widths[g]
        raise RowCapacityError(
            f"new_block_ids of request row {req_index}, {self._layout.describe(g)}",
            expected=f"at most {width} columns in the row",
            actual=f"{end} > {width} ({begin} filled, {end - begin} new)",
            hint="Raise max_num_blocks of the group (max_num_blocks_per_group), or limit the "
            "request's length; nothing was staged for any group",
        )


def _is_list(values: object) -> bool:
    """Whether these can be ids in an order of their own."""
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    is_text = isinstance(values, (str, bytes, bytearray, memoryview))
    return isinstance(values, (Sequence, array)) and not is_text
