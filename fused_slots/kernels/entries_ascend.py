"""Reading row lengths and table entries of a tile, in the forms that lower well on Ascend.

Addresses are contiguous where they can be, since a computed address costs a scalar load and some
seven scalar operations a token; they are made safe by value, since masked-off lanes are read all
the same.
"""

import triton
import triton.language as tl

from fused_slots.kernels.layout import INT32_MAX

WINDOW = tl.constexpr(64)
"""Columns that a tile within one row reads at once."""
ROWS = tl.constexpr(256)
"""Rows whose numbers a program holds on chip at a time."""


@triton.jit
def gather_in_tile(values, lane):
    """values[lane] in on-chip memory; by bitcast, since int32 cannot be gathered there."""
    return tl.gather(values.to(tl.float32, bitcast=True), lane, 0).to(tl.int32, bitcast=True)


@triton.jit
def of_rows(found, row, first, numbers_ptr, max_num_reqs):
    """numbers[row] where row is one of ROWS rows from `first` on, `found` where it is before.

    Called for all chunks of rows in ascending order, it leaves every row's own number.
    """
    line = first + tl.arange(0, ROWS)
    numbers = tl.load(numbers_ptr + line, mask=line < max_num_reqs, other=0)
    place = tl.minimum(tl.maximum(row - first, 0), ROWS - 1)
    return tl.where(row >= first, gather_in_tile(numbers, place), found)


@triton.jit
def load_chosen(pointer, chosen, element):
    """pointer[element] where chosen, else any number; what is not chosen is not read."""
    read = tl.max(tl.where(chosen, element, -1), axis=0)
    values = element * 0
    if read >= 0:
        # Through a select, so that the address is computed as a vector and not lane by lane.
        values = tl.load(pointer + tl.where(chosen, element, read))
    return values


@triton.jit
def window_of_row(
    row, lowest, filled, starts_ptr, bases_ptr, ids_ptr, table_ptr, width,
    STAGED: tl.constexpr,
):  # fmt: skip
    """WINDOW columns of one row, from `lowest` on, as one transfer (two in a row being written)."""
    lane = tl.arange(0, WINDOW)
    entries_ptr = table_ptr + row.to(tl.int64) * width + lowest
    if STAGED:
        start = tl.load(starts_ptr + row)
        window = tl.load(entries_ptr + lane, mask=lane < start - lowest, other=0)
        if filled > start:
            first = tl.maximum(start, lowest)
            staged_ptr = ids_ptr + tl.load(bases_ptr + row).to(tl.int64) + lowest
            inside = (lane >= first - lowest) & (lane < filled - lowest)
            staged = tl.load(staged_ptr + lane, mask=inside, other=0)
            window = tl.where(lane < start - lowest, window, staged)
    else:
        window = tl.load(entries_ptr + lane, mask=lane < filled - lowest, other=0)
    return window


@triton.jit
def table_entries(
    wanted,
    row,
    column,
    filled_ptr,
    starts_ptr,
    bases_ptr,
    ids_ptr,
    table_ptr,
    width,
    max_num_reqs,
    STAGED: tl.constexpr,
):
    """Filled columns of each token's row, and the id in its column; column in [0, width).

    A tile within one row and WINDOW columns reads both in one transfer; others token by token.
    STAGED: columns from starts[row] on are being written by this launch and are read from the
    staged ids, at bases[row] + column.
    """
    lowest_row = tl.min(tl.where(wanted, row, INT32_MAX), axis=0)
    highest_row = tl.max(tl.where(wanted, row, -1), axis=0)
    lowest = tl.minimum(tl.min(tl.where(wanted, column, INT32_MAX), axis=0), width - 1)
    highest = tl.max(tl.where(wanted, column, -1), axis=0)
    if (highest_row <= lowest_row) & (highest - lowest < WINDOW):
        only_row = tl.maximum(highest_row, 0)
        length = tl.load(filled_ptr + only_row)
        filled = column * 0 + length
        window = window_of_row(
            only_row, lowest, length, starts_ptr, bases_ptr, ids_ptr, table_ptr, width,
            STAGED,
        )  # fmt: skip
        block_id = gather_in_tile(window, tl.minimum(tl.maximum(column - lowest, 0), WINDOW - 1))
    else:
        filled = row * 0
        for first in range(0, max_num_reqs, ROWS):
            filled = of_rows(filled, row, first, filled_ptr, max_num_reqs)
        # int32: the manager refuses tables of 2^31 columns in all rows.
        element = row * width + column
        if STAGED:
            start = row * 0
            for first in range(0, max_num_reqs, ROWS):
                start = of_rows(start, row, first, starts_ptr, max_num_reqs)
            block_id = load_chosen(table_ptr, wanted & (column < start), element)
            staged = wanted & (column >= start) & (column < filled)
            if tl.max(staged.to(tl.int32), axis=0) > 0:
                base = row * 0
                for first in range(0, max_num_reqs, ROWS):
                    base = of_rows(base, row, first, bases_ptr, max_num_reqs)
                staged_id = load_chosen(ids_ptr, staged, base + column)
                block_id = tl.where(staged, staged_id, block_id)
        else:
            block_id = tl.load(table_ptr + tl.where(wanted, element, 0))
    return filled, block_id
