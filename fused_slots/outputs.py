"""Checks of the buffers that callers give for results, made before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fused_slots.arguments import INDEX_DTYPES, layout_of, tensor_error
from fused_slots.backends.base import Backend
from fused_slots.faults import INT32_MAX, InvalidArgumentError
from fused_slots.host.block_ids import check_lists
from fused_slots.layout import TableLayout


def check_matrix(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    minimum_shape: tuple[int, int],
) -> None:
    """Check a 2-D tensor with contiguous, separate rows, at least as large as `minimum_shape`.

    Raises:
        InvalidArgumentError: it is no tensor, or has the wrong dtype, shape, layout or device.
    """
    if error := tensor_error(name, tensor, dtypes, device, minimum_shape):
        raise error
    shape = tensor.shape
    is_strided = tensor.layout is torch.strided
    if not is_strided or (shape[1] > 1 and tensor.stride(1) != 1):
        raise InvalidArgumentError(
            name, expected="contiguous rows (stride(1) == 1)", actual=layout_of(tensor)
        )
    if shape[0] > 1 and tensor.stride(0) < shape[1]:
        raise InvalidArgumentError(
            name,
            expected=f"rows that do not overlap (stride(0) >= {shape[1]})",
            actual=layout_of(tensor),
        )


def check_tables_out(
    layout: TableLayout, device: torch.device, out: Sequence[torch.Tensor]
) -> None:
    """Check a caller's tables for a gather: int32 [rows, >= width] each, with memory of its own.

    Raises:
        InvalidArgumentError: names the table and what is wrong with it.
    """
    check_lists(layout, "out", out, "tables")
    for g, table in enumerate(out):
        check_matrix(f"out[{g}]", table, (torch.int32,), device, (0, layout.widths[g]))
    spans = sorted((table.data_ptr(), g) for g, table in enumerate(out) if table.numel())
    end = 0
    for begin, g in spans:
        if begin < end:
            _check_apart(out)
            return
        rows, width = out[g].shape
        end = begin + ((rows - 1) * out[g].stride(0) + width) * out[g].element_size()


def _check_apart(out: Sequence[torch.Tensor]) -> None:
    """Refuse tables that share an element; columns of one wider matrix may alternate."""
    rows = np.array(
        [
            (table.data_ptr() + 4 * row * table.stride(0), 4 * table.shape[1], g)
            for g, table in enumerate(out)
            for row in range(len(table) if table.numel() else 0)
        ],
        dtype=np.int64,
    )
    rows = rows[np.lexsort((rows[:, 2], rows[:, 0]))]
    shared = np.flatnonzero(rows[1:, 0] < rows[:-1, 0] + rows[:-1, 1])
    if len(shared):
        first, second = sorted(rows[shared[0] : shared[0] + 2, 2].tolist())
        raise InvalidArgumentError(
            f"out[{second}]", expected="a table of its own", actual=f"the memory of out[{first}]"
        )


def is_own_table_list(backend: Backend, out: Sequence[torch.Tensor]) -> bool:
    """Whether `out` is `input_block_tables`, whose contents are tracked from call to call.

    Raises:
        InvalidArgumentError: it is a part of the manager's memory, written behind its back.
    """
    gathered = backend.input_tables
    if out and all(a.data_ptr() == b.data_ptr() for a, b in zip(out, gathered, strict=True)):
        return True
    own = backend.table_storages | backend.slot_storages
    for g, table in enumerate(out):
        if table.untyped_storage().data_ptr() in own:
            raise InvalidArgumentError(
                f"out[{g}]",
                expected="memory outside the manager, or input_block_tables whole",
                actual="a part of its memory",
            )
    return False


def check_slots_out(
    backend: Backend, device: torch.device, out: torch.Tensor, largest_ids: Sequence[int]
) -> None:
    """Check an output of slots: [G, capacity], int32 or int64, wide enough for every slot.

    Raises:
        InvalidArgumentError: wrong shape, dtype or device, an int32 buffer that a slot of a block
            already in the tables does not fit, or the memory of the tables themselves.
    """
    layout = backend.layout
    check_matrix("out", out, INDEX_DTYPES, device, (layout.num_groups, 0))
    if out.shape[0] != layout.num_groups:
        raise InvalidArgumentError(
            "out",
            expected=f"{layout.num_groups} rows, one per KV cache group",
            actual=f"{out.shape[0]}",
        )
    if out.numel() and out.untyped_storage().data_ptr() in backend.table_storages:
        raise InvalidArgumentError(
            "out",
            expected="memory outside the manager's tables and row lengths",
            actual="a part of them",
        )
    if out.dtype is torch.int64 or layout.slot_dtype is torch.int32:
        return
    for g, group in enumerate(layout.groups):
        last_slot = (largest_ids[g] + 1) * group.block_size - 1
        if group.maps_slots and last_slot > INT32_MAX:
            raise InvalidArgumentError(
                "out",
                expected=f"int64: {layout.describe(g)} holds block {largest_ids[g]}, whose last "
                f"slot is {last_slot}",
                actual="torch.int32",
            )
