"""Reading row lengths and columns of a tile, in the forms that lower well on Ascend.

Addresses are contiguous where they can be, since a computed address costs a scalar load and some
seven scalar operations a token; they are made safe by value, since masked-off lanes are read all
the same.

What a launch must know of a group's rows lies in three planes of int32 [G, max_num_reqs]: the first
column that it writes (`starts`), the row's length, and where column 0 of what it writes would be,
counted from the group's lengths (`bases`). A function gets the group's lengths and the distance of
the planes; where a launch writes nothing that distance is 0, so that every start is a length.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.layout import RING, ROWS, RUNS, STAGED, WINDOW
from fused_slots.kernels.layout import INT32_MAX


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
    lane = tl.minimum(tl.maximum(row - first, 0), ROWS - 1)
    return tl.where(row >= first, gather_in_tile(numbers, lane), found)


@triton.jit
def numbers_of(row, numbers_ptr, max_num_reqs):
    """numbers[row] of rows that exist, ROWS of which are held on chip at a time."""
    line = tl.arange(0, ROWS)
    numbers = tl.load(numbers_ptr + line, mask=line < max_num_reqs, other=0)
    found = gather_in_tile(numbers, tl.minimum(row, ROWS - 1))
    for first in range(ROWS, max_num_reqs, ROWS):
        found = of_rows(found, row, first, numbers_ptr, max_num_reqs)
    return found


@triton.jit
def load_chosen(pointer, refused, element):
    """pointer[element] where refused >= 0, else any number; what is refused is not read."""
    refused = refused >> 31
    read = tl.max(element | refused, axis=0)
    values = element * 0
    if read >= 0:
        # Through a select, so that the address is computed as a vector and not lane by lane.
        values = tl.load(pointer + tl.where(refused == 0, element, read))
    return values


@triton.jit
def window_of_row(row, lowest, filled, lengths_ptr, plane, table_ptr, width, FLAGS: tl.constexpr):
    """WINDOW columns of one row, from `lowest` on, as one transfer (two in a row being written)."""
    lane = tl.arange(0, WINDOW)
    columns_ptr = table_ptr + row.to(tl.int64) * width + lowest
    if STAGED & FLAGS:
        start = filled
        if plane > 0:
            start = tl.load(lengths_ptr - plane + row)
        window = tl.load(columns_ptr + lane, mask=lane < start - lowest, other=0)
        if filled > start:
            first = tl.maximum(start, lowest)
            base = tl.load(lengths_ptr + plane + row)
            # Loaded from its first column on and moved in on-chip memory: a lower bound in a mask
            # becomes padding on the left, of which a transfer takes 32 bytes.
            staged_ptr = lengths_ptr + base.to(tl.int64) + first
            staged = tl.load(staged_ptr + lane, mask=lane < filled - first, other=0)
            staged = gather_in_tile(staged, tl.maximum(lane - (first - lowest), 0))
            window = tl.where(lane < start - lowest, window, staged)
    else:
        window = tl.load(columns_ptr + lane, mask=lane < filled - lowest, other=0)
    return window


@triton.jit
def columns_of_tile(
    refused, row, column, single, lengths_ptr, plane, table_ptr, width, max_num_reqs,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Filled columns of each token's row, and the id in its column, >= 0; not where refused < 0.

    A `single` row within WINDOW columns is read in one transfer; others token by token.
    STAGED: columns that this launch writes are read from the staged ids.
    """
    if RING & FLAGS:
        width = tl.maximum(width, 1)
    kept = ~(refused >> 31)
    row = row & kept
    column = tl.minimum(column, width - 1) & kept
    if RUNS & FLAGS:
        lowest, far = 0, 1
        if single > 0:
            lowest = tl.minimum(tl.min(column | (~kept & INT32_MAX), axis=0), width - 1)
            far = (tl.max(column, axis=0) - lowest >= WINDOW).to(tl.int32)
        if far == 0:
            only_row = tl.max(row, axis=0)
            length = tl.load(lengths_ptr + only_row)
            filled = column * 0 + length
            window = window_of_row(
                only_row, lowest, length, lengths_ptr, plane, table_ptr, width, FLAGS
            )
            block_id = gather_in_tile(window, tl.maximum(column - lowest, 0))
        else:
            filled, block_id = scattered_columns(
                refused, row, column, lengths_ptr, plane, table_ptr, width, max_num_reqs, FLAGS
            )
    else:
        filled, block_id = scattered_columns(
            refused, row, column, lengths_ptr, plane, table_ptr, width, max_num_reqs, FLAGS
        )
    return filled, block_id


@triton.jit
def scattered_columns(
    refused, row, column, lengths_ptr, plane, table_ptr, width, max_num_reqs, FLAGS: tl.constexpr
):
    """columns_of_tile, token by token."""
    filled = numbers_of(row, lengths_ptr, max_num_reqs)
    # int32: the manager refuses tables of 2^31 columns in all rows.
    element = row * width + column
    if STAGED & FLAGS:
        if plane > 0:
            start = numbers_of(row, lengths_ptr - plane, max_num_reqs)
            block_id = load_chosen(table_ptr, refused | (start - 1 - column), element)
            unstaged = refused | (column - start) | (filled - 1 - column)
            if tl.min(~unstaged >> 31, axis=0) < 0:
                base = numbers_of(row, lengths_ptr + plane, max_num_reqs)
                staged_id = load_chosen(lengths_ptr, unstaged, base + column)
                block_id = tl.where(unstaged < 0, block_id, staged_id)
        else:
            block_id = tl.load(table_ptr + tl.where(refused >> 31 == 0, element, 0))
    else:
        block_id = tl.load(table_ptr + tl.where(refused >> 31 == 0, element, 0))
    return filled, block_id
