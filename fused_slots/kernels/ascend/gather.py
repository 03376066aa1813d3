"""The gather of a step: each batch entry's columns into the tables that attention reads.

Its state is per (group, batch entry), four int32: the row and its generation that the entry was
copied from, how many columns it has filled and how many are nulled. One program owns a batch entry.
It compares ENTRIES of them at a time; each that changed is then copied in contiguous pieces, whose
store has an upper bound only: anything else would be read, changed and written back as a whole.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import (
    clamp_rows,
    load_row,
    quotient,
    scalar_quotient,
)
from fused_slots.kernels.ascend.layout import COLUMNS, ENTRIES, FAULTS
from fused_slots.kernels.ascend.table import numbers_of
from fused_slots.kernels.common import changed_columns
from fused_slots.kernels.layout import ROW_OUT_OF_RANGE


@triton.jit
def copy_columns(target_ptr, source_ptr, begin, end):
    """target[begin:end] = source[begin:end]"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(source_ptr + column, mask=column < end, other=0)
        tl.store(target_ptr + column, values, mask=column < end)


@triton.jit
def zero_columns(target_ptr, begin, end):
    """target[begin:end] = 0"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tl.store(target_ptr + column, tl.zeros([COLUMNS], tl.int32), mask=column < end)


@triton.jit
def number_of(chosen, numbers):
    """The number (>= 0) of the one chosen lane, as a scalar."""
    return tl.sum(tl.where(chosen, numbers, 0), axis=0)


@triton.jit
def gather_entry(
    entry, begin, end, gathered_ptr, gathered_stride, idx_mapping_ptr, num_computed_ptr,
    lengths_ptr, plane, table_ptr, width, reach, column_divisor, line_ptr, num_reqs, max_num_reqs,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Make columns [begin, end) of one batch entry what they must be.

    Its numbers are read anew: picked from vectors, each would need a reduction and an event.
    """
    index = load_row(idx_mapping_ptr, tl.minimum(entry, tl.maximum(num_reqs - 1, 0)), max_num_reqs)
    exists = (entry < num_reqs) & (index >= 0) & (index < max_num_reqs)
    row = tl.where(exists, index, 0)
    length = tl.where(exists, tl.load(lengths_ptr + row), 0)
    start = tl.minimum(tl.load(lengths_ptr - plane + row), length)
    base = tl.load(lengths_ptr + plane + row)
    below = tl.maximum(tl.maximum(tl.load(num_computed_ptr + row), 0) - reach, 0)
    nulls = tl.minimum(scalar_quotient(below, column_divisor, FLAGS), length)
    nulls = tl.where(reach == 0, 0, nulls)
    target_ptr = gathered_ptr + entry * gathered_stride
    source_ptr = table_ptr + row.to(tl.int64) * width
    lowest = tl.maximum(begin, nulls)
    zero_columns(target_ptr, begin, tl.minimum(nulls, end))
    copy_columns(target_ptr, source_ptr, lowest, tl.minimum(start, end))
    copy_columns(
        target_ptr,
        lengths_ptr + base.to(tl.int64),
        tl.maximum(lowest, start),
        tl.minimum(length, end),
    )
    zero_columns(target_ptr, tl.maximum(begin, length), end)
    if (entry < num_reqs) & (index >= max_num_reqs):
        tl.atomic_add(line_ptr + FAULTS + ROW_OUT_OF_RANGE, 1)


@triton.jit
def numbers_of_entries(
    first_entry, idx_mapping_ptr, num_computed_ptr, lengths_ptr, generations_ptr, reach,
    column_divisor, num_reqs, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Of ENTRIES batch entries the row, generation, filled and nulled columns; none: -1, 0, 0, 0.

    A row out of range is max_num_reqs.
    """
    entry = first_entry + tl.arange(0, ENTRIES)
    index = tl.load(idx_mapping_ptr + entry, mask=entry < num_reqs, other=-1)
    row = clamp_rows(index, max_num_reqs)
    exists = (row >= 0) & (row < max_num_reqs)
    safe_row = tl.where(exists, row, 0)
    generation = tl.where(exists, numbers_of(safe_row, generations_ptr, max_num_reqs), 0)
    filled = tl.where(exists, numbers_of(safe_row, lengths_ptr, max_num_reqs), 0)
    nulled = filled * 0
    if reach > 0:
        computed = numbers_of(safe_row, num_computed_ptr, max_num_reqs)
        below = tl.maximum(tl.maximum(computed, 0) - reach, 0)
        nulled = tl.minimum(quotient(below, column_divisor, FLAGS), filled)
    return row, generation, filled, nulled


@triton.jit
def gather_entries(
    first_entry, end, gathered_ptr, gathered_stride, idx_mapping_ptr, num_computed_ptr, lengths_ptr,
    plane, generations_ptr, table_ptr, width, reach, column_divisor, state_ptr, line_ptr, num_reqs,
    max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Bring entries [first_entry, end), at most ENTRIES, up to date: copy what has changed."""
    lane = tl.arange(0, ENTRIES)
    live = lane < end - first_entry
    # The state's four numbers lie in planes.
    state_ptr += first_entry + lane
    old_key = tl.load(state_ptr, mask=live, other=-1)
    old_generation = tl.load(state_ptr + max_num_reqs, mask=live, other=0)
    old_filled = tl.load(state_ptr + 2 * max_num_reqs, mask=live, other=0)
    old_nulled = tl.load(state_ptr + 3 * max_num_reqs, mask=live, other=0)
    row, generation, filled, nulled = numbers_of_entries(
        first_entry, idx_mapping_ptr, num_computed_ptr, lengths_ptr, generations_ptr, reach,
        column_divisor, num_reqs, max_num_reqs, FLAGS,
    )  # fmt: skip
    key = tl.where(row < max_num_reqs, row, -1)
    kept = (key == old_key) & (generation == old_generation)
    low, high = changed_columns(kept, filled, nulled, old_filled, old_nulled, width)
    # Rows out of range among them, which gather_entry counts.
    changed = live & ((low < high) | (row >= max_num_reqs))
    previous = -1
    while previous < ENTRIES:
        previous = tl.min(tl.where(changed & (lane > previous), lane, ENTRIES), axis=0)
        if previous < ENTRIES:
            gather_entry(
                first_entry + previous, number_of(lane == previous, low),
                number_of(lane == previous, high), gathered_ptr, gathered_stride, idx_mapping_ptr,
                num_computed_ptr, lengths_ptr, plane, table_ptr, width, reach, column_divisor,
                line_ptr, num_reqs, max_num_reqs, FLAGS,
            )  # fmt: skip
    tl.store(state_ptr, key, mask=live)
    tl.store(state_ptr + max_num_reqs, generation, mask=live)
    tl.store(state_ptr + 2 * max_num_reqs, filled, mask=live)
    tl.store(state_ptr + 3 * max_num_reqs, nulled, mask=live)
