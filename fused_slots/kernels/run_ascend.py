"""Slots of consecutive positions of one request: prefill, at a fraction of the general cost.

Only what a lane adds to the first position is left to vectors. Request, column of the first token
and the number of tokens that the row's columns hold are scalars; so is the number of faults.
"""

import triton
import triton.language as tl

from fused_slots.kernels.entries_ascend import WINDOW, gather_in_tile, window_of_row
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_OUT_OF_ROW,
    INT32_MAX,
    KIND_PAGED,
    PAD,
)
from fused_slots.kernels.mapping_ascend import quotient

FAR_SQUARED = tl.constexpr(0x5E800000)
"""The bits of 2^62 as a float32."""
ROUNDED = tl.constexpr(256)
"""The distance of float32 numbers from 2^31 on."""


@triton.jit
def run_begins(positions_ptr, first, count, SPAN: tl.constexpr):
    """The first of `count` positions and whether they are consecutive, from 0 to far below 2^31."""
    lane = tl.arange(0, SPAN)
    position = tl.load(positions_ptr + first + lane, mask=lane < count, other=0)
    low = position.to(tl.int32) - lane
    # What the low words lose, a float32 tells: the bits of its square grow as its magnitude does.
    rounded = position.to(tl.float32)
    square = (rounded * rounded).to(tl.int32, bitcast=True)
    if count < SPAN:
        begin = tl.min(tl.where(lane >= count, INT32_MAX, low), axis=0)
        highest = tl.max(tl.where(lane >= count, -1, low), axis=0)
    else:
        begin = tl.min(low, axis=0)
        highest = tl.max(low, axis=0)
    # Below 2^31 by more than float32 rounds there, a negative number is known by its magnitude.
    below = begin.to(tl.uint32) < (INT32_MAX - 2 * SPAN - ROUNDED)
    return begin, (highest == begin) & below & (tl.max(square, axis=0) <= FAR_SQUARED)


@triton.jit
def map_run(
    first,
    count,
    entry,
    group_slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    g,
    num_groups,
    group,
    kind,
    width,
    column_size,
    column_shift,
    table_ptr,
    filled_ptr,
    starts_ptr,
    bases_ptr,
    ids_ptr,
    faults_ptr,
    max_num_reqs,
    SPAN: tl.constexpr,
    POW2: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Map `count` tokens from `first` on, of batch entry `entry` at the first, if they are a run.

    A run has one request, a row that exists, consecutive positions and at most WINDOW columns.
    Returns whether the tokens were mapped.
    """
    done = 0
    index = tl.load(idx_mapping_ptr + entry)
    ours = (tl.load(query_start_loc_ptr + entry + 1) >= first + count) & (kind == KIND_PAGED)
    # One unsigned comparison refuses negative rows, too.
    ours = ours & (index.to(tl.uint64) < max_num_reqs)
    if REPLAY:
        unreplayed = tl.load(replay_start_ptr + entry) == 0
        ours = ours & (unreplayed | (tl.load(group + CACHEABLE) == 0))
    if ours:
        row = index.to(tl.int32)
        begin, consecutive = run_begins(positions_ptr, first, count, SPAN)
        column = scalar_quotient(begin, column_size, column_shift, POW2)
        within = begin - column * column_size
        last_column = scalar_quotient(within + SPAN - 1, column_size, column_shift, POW2)
        if consecutive & (last_column < WINDOW):
            done = 1
            length = tl.load(filled_ptr + row)
            window = window_of_row(
                row, column, length, starts_ptr, bases_ptr, ids_ptr,
                table_ptr, width, STAGED,
            )  # fmt: skip
            lane = tl.arange(0, SPAN)
            place = within + lane
            place_column = quotient(place, column_size, column_shift, POW2)
            slot = (gather_in_tile(window, place_column) - place_column) * column_size + place
            slot = slot.to(group_slots_ptr.dtype.element_ty)
            if (length - column > last_column) & (count == SPAN):
                tl.store(group_slots_ptr + first + lane, slot)
            else:
                held = (length - column).to(tl.int64) * column_size - within
                held = tl.maximum(tl.minimum(held, count), 0).to(tl.int32)
                slot = tl.where(lane >= held, PAD, slot)
                tl.store(group_slots_ptr + first + lane, slot, mask=lane < count)
                if held < count:
                    missing = count - held
                    tl.atomic_add(faults_ptr + COLUMN_OUT_OF_ROW * num_groups + g, missing)
    return done


@triton.jit
def scalar_quotient(value, divisor, shift, POW2: tl.constexpr):
    """value // divisor for value >= 0: exact in the scalar unit."""
    if POW2:
        return value >> shift
    else:
        return value // divisor
