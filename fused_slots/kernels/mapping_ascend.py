"""The mapping of a tile of tokens to slots, in the forms that lower well on Ascend.

The same formula as mapping.py. What differs, and why: vectors are int32 throughout, since int64
vectors become scalar loops; addresses are contiguous where they can be, since a computed address
costs a scalar load and some seven scalar operations a token; addresses are made safe by value,
since masked-off lanes are read all the same; faults are summed and counted by one int32 atomic
under an if, since other atomics take a lock in program order. Faults have no details here.
"""

import triton
import triton.language as tl

from fused_slots.kernels.descriptor import (
    CACHEABLE,
    COLUMN_SHIFT,
    COLUMN_SIZE,
    COLUMNS_PER_BLOCK,
    DESCRIPTOR_WIDTH,
    KIND,
    KIND_NONE,
    KIND_RING,
    OFFSET,
    OFFSET_UNIT,
    RANK,
    SHARDS,
    SHARDS_SHIFT,
    VIRTUAL_SHIFT,
    VIRTUAL_SIZE,
    WIDTH,
)
from fused_slots.kernels.mapping import (
    COLUMN_OUT_OF_ROW,
    EMPTY_RING,
    INT32_MAX,
    PAD,
    ROW_OUT_OF_RANGE,
)

FAR = tl.constexpr(2147483648.0)
WINDOW = tl.constexpr(64)
"""Columns that a tile within one row reads at once."""


@triton.jit
def clamp_int64(value):
    """An int64 as int32 in [-1, 2^31 - 1]: a float32 of it tells what the low 32 bits lost."""
    low = value.to(tl.int32)
    rounded = value.to(tl.float32)
    low = tl.where((rounded > FAR) | (low < 0), INT32_MAX, low)
    return tl.where(rounded < 0.0, -1, low)


@triton.jit
def clamp_rows(index, max_num_reqs):
    """Row indices of either width as int32 in [-1, max_num_reqs]."""
    if index.dtype == tl.int64:
        index = clamp_int64(index)
    return tl.minimum(tl.maximum(index, -1), max_num_reqs)


@triton.jit
def load_row(idx_mapping_ptr, entry, max_num_reqs):
    """One batch entry's row, a scalar, as clamp_rows."""
    index = tl.load(idx_mapping_ptr + entry)
    return tl.minimum(tl.maximum(index, -1), max_num_reqs).to(tl.int32)


@triton.jit
def quotient(value, divisor, shift, POW2: tl.constexpr):
    """value // divisor for value >= 0. The vector unit's float32 quotient may be off by one."""
    if POW2:
        return value >> shift
    else:
        result = value // divisor
        left = value - result * divisor
        result += left >> 31
        left += (left >> 31) & divisor
        return result - ((divisor - 1 - left) >> 31)


@triton.jit
def remainder(position, place, size, shift, POW2: tl.constexpr):
    """position mod size of an int64 position >= 0; `place` is it clamped to int32."""
    if POW2:
        return position.to(tl.int32) & (size - 1)
    else:
        result = place - quotient(place, size, shift, POW2) * size
        if tl.max(place, axis=0) == INT32_MAX:
            result = (position % size).to(tl.int32)
        return result


@triton.jit
def gather_in_tile(values, lane):
    """values[lane] in on-chip memory; by bitcast, since int32 cannot be gathered there."""
    return tl.gather(values.to(tl.float32, bitcast=True), lane, 0).to(tl.int32, bitcast=True)


@triton.jit
def of_rows(numbers_ptr, row, max_num_reqs, ROWS: tl.constexpr):
    """numbers[row] of a vector of rows; all numbers are read at once where they fit on chip."""
    if ROWS > 0:
        line = tl.arange(0, ROWS)
        numbers = tl.load(numbers_ptr + line, mask=line < max_num_reqs, other=0)
        return gather_in_tile(numbers, row)
    else:
        return tl.load(numbers_ptr + row)


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
        window = tl.load(entries_ptr + lane, mask=lane < width - lowest, other=0)
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
    ROWS: tl.constexpr,
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
        filled = of_rows(filled_ptr, row, max_num_reqs, ROWS)
        # int32: the manager refuses tables of 2^31 columns in all rows.
        element = row * width + column
        if STAGED:
            start = of_rows(starts_ptr, row, max_num_reqs, ROWS)
            block_id = load_chosen(table_ptr, wanted & (column < start), element)
            staged = wanted & (column >= start) & (column < filled)
            if tl.max(staged.to(tl.int32), axis=0) > 0:
                place = of_rows(bases_ptr, row, max_num_reqs, ROWS) + column
                block_id = tl.where(staged, load_chosen(ids_ptr, staged, place), block_id)
        else:
            block_id = tl.load(table_ptr + tl.where(wanted, element, 0))
    return filled, block_id


@triton.jit
def count_faults(faults_ptr, faulty, code, g, num_groups):
    count = tl.sum(faulty.to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(faults_ptr + code * num_groups + g, count)


@triton.jit
def map_tile(
    live,
    row,
    position,
    replay_start,
    g,
    num_groups,
    descriptor_ptr,
    arena_ptr,
    filled_ptr,
    starts_ptr,
    bases_ptr,
    ids_ptr,
    faults_ptr,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    SLOT_DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    ROWS: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Slots of a tile of tokens of one group, PAD where a token has none; faults are counted."""
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    kind = tl.load(group + KIND)
    width = tl.load(group + WIDTH)
    column_size = tl.load(group + COLUMN_SIZE)
    column_shift = tl.load(group + COLUMN_SHIFT)
    place = clamp_int64(position)
    wanted = live & (row >= 0) & (row < max_num_reqs) & (place >= 0) & (kind != KIND_NONE)
    if REPLAY:
        replayed = (replay_start != 0) & (replay_start <= place)
        replayed = replayed & (place - replay_window < replay_start)
        wanted = wanted & ((replayed == 0) | (tl.load(group + CACHEABLE) == 0))
    place = tl.maximum(place, 0)
    if SHARDED:
        virtual_size = tl.load(group + VIRTUAL_SIZE)
        virtual_shift = tl.load(group + VIRTUAL_SHIFT)
        shards = tl.load(group + SHARDS)
        within = remainder(position, place, virtual_size, virtual_shift, POW2)
        run = quotient(within, interleave, interleave_shift, POW2)
        stripe = quotient(run, shards, tl.load(group + SHARDS_SHIFT), POW2)
        wanted = wanted & (run - stripe * shards == tl.load(group + RANK))
        local = stripe * interleave + (within - run * interleave)
        block_column = quotient(local, column_size, column_shift, POW2)
        offset = local - block_column * column_size
        block = quotient(place, virtual_size, virtual_shift, POW2)
        # Far positions are in no row; held below 2^24 blocks, their columns cannot wrap.
        column = tl.minimum(block, 16777215) * tl.load(group + COLUMNS_PER_BLOCK) + block_column
    else:
        column = quotient(place, column_size, column_shift, POW2)
        offset = place - column * column_size
    if RING:
        ring_offset = remainder(position, place, column_size, column_shift, POW2)
        offset = tl.where(kind == KIND_RING, ring_offset, offset)
        column = tl.where(kind == KIND_RING, 0, column)
    first = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    safe_row = tl.where(wanted, row, 0)
    filled, block_id = table_entries(
        wanted,
        safe_row,
        tl.minimum(tl.maximum(column, 0), width - 1),
        filled_ptr + g * max_num_reqs,
        starts_ptr + g * max_num_reqs,
        bases_ptr + g * max_num_reqs,
        ids_ptr,
        first,
        width,
        max_num_reqs,
        ROWS,
        STAGED,
    )
    code = tl.where(kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)
    count_faults(faults_ptr, wanted & (column >= filled), code, g, num_groups)
    strange = live & (row >= max_num_reqs) & (kind != KIND_NONE)
    count_faults(faults_ptr, strange, ROW_OUT_OF_RANGE, g, num_groups)
    # In int32: the manager refuses pools whose slots leave it.
    slot = tl.where(wanted & (column < filled), block_id * column_size + offset, PAD)
    return slot.to(SLOT_DTYPE)
