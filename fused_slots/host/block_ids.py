"""The slow path of staging: ids that are no plain lists of ints, and what is wrong with them.

A call that staging does not recognise comes here. It either turns out to be fine (arrays, NumPy
integers) or gets the error that names request, group and place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fused_slots.faults import INT32_MAX, BlockIdError, InvalidArgumentError, RowCapacityError
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
    check_request(layout, req_index, new_block_ids, overwrite)
    lists = []
    for g, group_ids in enumerate(new_block_ids):
        lists.append(plain_ids(layout, req_index, g, group_ids))
        begin = 0 if overwrite else int(lengths[req_index, g])
        end = begin + len(lists[g]) * layout.groups[g].columns_per_block
        if lists[g] and end > layout.widths[g]:
            raise_over_capacity(layout, req_index, g, begin, end)
    return int(req_index), lists, bool(overwrite)


def check_request(
    layout: TableLayout,
    req_index: int,
    new_block_ids: Sequence[Sequence[int]],
    overwrite: bool,
) -> None:
    """Check everything about a call but its ids.

    Raises:
        InvalidArgumentError: no such row, not one list per group, or overwrite is no bool.
    """
    is_row = isinstance(req_index, (int, np.integer)) and not isinstance(req_index, bool)
    if not is_row or not 0 <= req_index < layout.max_num_reqs:
        raise InvalidArgumentError(
            "req_index",
            expected=f"a row in [0, {layout.max_num_reqs})",
            actual=repr(req_index),
            hint="max_num_reqs sets the number of rows",
        )
    if not isinstance(overwrite, (bool, np.bool_)):
        raise InvalidArgumentError("overwrite", expected="True or False", actual=repr(overwrite))
    is_list = _is_list(new_block_ids)
    if not is_list or len(new_block_ids) != layout.num_groups:
        raise InvalidArgumentError(
            f"new_block_ids of request row {req_index}",
            expected=f"{layout.num_groups} lists, one per KV cache group",
            actual=str(len(new_block_ids)) if is_list else type(new_block_ids).__name__,
        )


def plain_ids(layout: TableLayout, req_index: int, g: int, group_ids: Sequence[int]) -> list[int]:
    """One group's ids as Python ints.

    Raises:
        BlockIdError: they are no list, or one of them is no id that the group accepts.
    """
    where = f"new_block_ids of request row {req_index}, {layout.describe(g)}"
    if not _is_list(group_ids):
        raise BlockIdError(where, expected="a list of block ids", actual=type(group_ids).__name__)
    limit = layout.max_block_ids[g]
    for place, block_id in enumerate(group_ids):
        if not isinstance(block_id, (int, np.integer)) or isinstance(block_id, bool):
            raise BlockIdError(f"{where}, entry {place}", expected="an int", actual=repr(block_id))
        if not 0 <= block_id <= limit:
            raise BlockIdError(
                f"{where}, entry {place}",
                expected=f"a block id in [0, {limit}]",
                actual=str(block_id),
                hint=f"The limit comes from the group: {layout.block_id_limit(g)}"
                if 0 <= block_id <= INT32_MAX
                else "Block ids are non-negative int32 numbers",
            )
    return [int(block_id) for block_id in group_ids]


def raise_over_capacity(
    layout: TableLayout, req_index: int, g: int, begin: int, end: int
) -> NoReturn:
    """Refuse ids that would fill a row beyond its width.

    Raises:
        RowCapacityError: always.
    """
    width = layout.widths[g]
    raise RowCapacityError(
        f"new_block_ids of request row {req_index}, {layout.describe(g)}",
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
