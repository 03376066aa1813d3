"""The slow path of staging: ids that are no plain lists of ints, and what is wrong with them.

A call that staging does not recognise comes here. It either turns out to be fine (arrays, NumPy
integers) or gets the error that names request, group and entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fused_slots.faults import INT32_MAX, BlockIdError, InvalidArgumentError, RowCapacityError
from fused_slots.groups import NULL_BLOCK_ID
from fused_slots.layout import TableLayout

PlainRequest = tuple[int, list[list[int]], bool]
"""Row, one list of ids per group, overwrite."""


def plain_request(
    layout: TableLayout,
    lengths: npt.NDArray[np.int32],
    req_index: int,
    new_block_ids: Sequence[Sequence[int]],
    overwrite: bool,
) -> PlainRequest:
    """One request's new blocks as Python ints in lists, checked.

    Args:
        layout: the manager's sizes.
        lengths: int32 [max_num_reqs, G], columns that each row has filled.
        req_index: the request's row.
        new_block_ids: per group, allocation block ids to append to the row.
        overwrite: start the row anew instead.

    Raises:
        InvalidArgumentError: the row, the number of groups or overwrite is wrong.
        BlockIdError: an id is not an int the group accepts.
        RowCapacityError: a row would hold more columns than it has.
    """
    row = check_row(layout, req_index)
    if not isinstance(overwrite, (bool, np.bool_)):
        raise InvalidArgumentError("overwrite", expected="True or False", actual=repr(overwrite))
    check_lists(layout, f"new_block_ids of request row {row}", new_block_ids, "lists")
    begins = [0] * layout.num_groups if overwrite else lengths[row].tolist()
    return row, _plain_lists(layout, row, begins, new_block_ids), bool(overwrite)


def plain_write(
    layout: TableLayout,
    lengths: npt.NDArray[np.int32],
    req_index: int,
    first_blocks: Sequence[int],
    new_block_ids: Sequence[Sequence[int]],
) -> tuple[int, list[int], list[list[int]]]:
    """A row, the columns from which it is replaced, and the new ids, in plain form and checked.

    Args:
        layout: the manager's sizes.
        lengths: int32 [max_num_reqs, G], columns that each row has filled.
        req_index: the request's row.
        first_blocks: per group, the first allocation block that is replaced.
        new_block_ids: per group, the allocation block ids that the row ends with.

    Raises:
        InvalidArgumentError, BlockIdError, RowCapacityError: as `HostRows.write`.
    """
    row = check_row(layout, req_index)
    check_lists(layout, f"new_block_ids of request row {row}", new_block_ids, "lists")
    check_lists(layout, f"first_blocks of request row {row}", first_blocks, "numbers")
    begins = []
    for g, first in enumerate(first_blocks):
        n = layout.groups[g].columns_per_block
        held = int(lengths[row, g]) // n
        if not _is_int(first) or not 0 <= first <= held:
            raise InvalidArgumentError(
                f"first_blocks of request row {row}, {layout.describe(g)}",
                expected=f"an int in [0, {held}]: the row holds {held} blocks",
                actual=repr(first),
            )
        begins.append(int(first) * n)
    return row, begins, _plain_lists(layout, row, begins, new_block_ids)


def _plain_lists(
    layout: TableLayout, row: int, begins: Sequence[int], new_block_ids: Sequence[Sequence[int]]
) -> list[list[int]]:
    """All groups' ids as Python ints, for a row that goes on at these columns."""
    lists = []
    for g, (begin, group_ids) in enumerate(zip(begins, new_block_ids, strict=True)):
        lists.append(plain_ids(layout, row, g, group_ids))
        end = begin + len(lists[g]) * layout.groups[g].columns_per_block
        if lists[g] and end > layout.widths[g]:
            raise_over_capacity(layout, row, g, begin, end)
    return lists


def check_row(layout: TableLayout, req_index: int, argument: str = "req_index") -> int:
    """A request's row as a Python int.

    Raises:
        InvalidArgumentError: no such row.
    """
    if not _is_int(req_index) or not 0 <= req_index < layout.max_num_reqs:
        raise InvalidArgumentError(
            argument,
            expected=f"a row in [0, {layout.max_num_reqs})",
            actual=repr(req_index),
            hint="max_num_reqs sets the number of rows",
        )
    return int(req_index)


def plain_ids(layout: TableLayout, req_index: int, g: int, group_ids: Sequence[int]) -> list[int]:
    """One group's ids as Python ints.

    Raises:
        BlockIdError: they are no list, or one of them is no id that the group accepts.
    """
    where = f"new_block_ids of request row {req_index}, {layout.describe(g)}"
    if not _is_list(group_ids):
        raise BlockIdError(where, expected="a list of block ids", actual=type(group_ids).__name__)
    limit = layout.max_block_ids[g]
    for entry, block_id in enumerate(group_ids):
        if not _is_int(block_id):
            raise BlockIdError(f"{where}, entry {entry}", expected="an int", actual=repr(block_id))
        if not 0 <= block_id <= limit:
            raise BlockIdError(
                f"{where}, entry {entry}",
                expected=f"a block id in [0, {limit}]",
                actual=str(block_id),
                hint=f"The limit comes from the group: {layout.block_id_limit(g)}"
                if 0 <= block_id <= INT32_MAX
                else "Block ids are non-negative int32 numbers",
            )
    return [int(block_id) for block_id in group_ids]


def null_ids(new_block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The null block in place of every id, of whatever pool; what is no id stays, to be refused."""
    if not _is_list(new_block_ids):
        return new_block_ids
    return [
        [NULL_BLOCK_ID if _is_int(id_) and 0 <= id_ <= INT32_MAX else id_ for id_ in group_ids]
        if _is_list(group_ids)
        else group_ids
        for group_ids in new_block_ids
    ]


def raise_over_capacity(
    layout: TableLayout, req_index: int, g: int, begin: int, end: int
) -> NoReturn:
    """Refuse ids that would fill a row beyond its width.

    Raises:
        RowCapacityError: always.
    """
    width, group = layout.widths[g], layout.groups[g]
    said = group.max_num_blocks * group.columns_per_block
    aligned = f" ({said} of max_num_blocks, aligned to whole multiples of 128 tokens)"
    raise RowCapacityError(
        f"new_block_ids of request row {req_index}, {layout.describe(g)}",
        expected=f"at most {width} columns in the row{aligned if width > said else ''}",
        actual=f"{end} > {width} ({begin} filled, {end - begin} new)",
        hint="Raise max_num_blocks of the group (max_num_blocks_per_group), or limit the "
        "request's length; nothing was staged for any group",
    )


def check_lists(layout: TableLayout, argument: str, values: Sequence[object], what: str) -> None:
    """Check that these are as many as there are groups.

    Raises:
        InvalidArgumentError: they are no list, or more or fewer.
    """
    is_list = _is_list(values)
    if not is_list or len(values) != layout.num_groups:
        raise InvalidArgumentError(
            argument,
            expected=f"{layout.num_groups} {what}, one per KV cache group",
            actual=str(len(values)) if is_list else type(values).__name__,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_list(values: object) -> bool:
    """Whether these can be ids in an order of their own."""
    if type(values) in (list, tuple):  # the abstract class takes longer to ask
        return True
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    is_text = isinstance(values, (str, bytes, bytearray, memoryview))
    return isinstance(values, (Sequence, array)) and not is_text
