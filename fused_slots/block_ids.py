"""The slow half of staging: ids that are no plain lists of ints, and what is wrong with them.

A call that the fast half of `HostRows.stage` does not recognise comes here. It either turns out to
be fine (tuples, arrays, NumPy integers) or gets the error that names request, group and place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from fused_slots.faults import INT32_MAX, BlockIdError, InvalidArgumentError, RowCapacityError
from fused_slots.layout import TableLayout


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
