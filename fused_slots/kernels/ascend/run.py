"""Slots of a run, consecutive positions of one request: prefill, at a fraction of the general cost.

Only what a lane adds to the first position is left to vectors. Request, column of the first token
and the number of tokens that the row's columns hold are scalars; so is the number of faults.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import null_columns, quotient, scalar_quotient, size_of
from fused_slots.kernels.ascend.layout import FAULTS, NULLS, REPLAY, RING, WINDOW
from fused_slots.kernels.ascend.table import gather_in_tile, window_of_row
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_OUT_OF_ROW,
    INT32_MAX,
)

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
    low = low | ((FAR_SQUARED - square) >> 31)
    if count < SPAN:
        low = gather_in_tile(low, tl.minimum(lane, count - 1))
    begin = tl.min(low, axis=0)
    # Below 2^31 by more than float32 rounds there, a negative number is known by its magnitude.
    below = begin.to(tl.uint32) < (INT32_MAX - 2 * SPAN - ROUNDED)
    return begin, (tl.max(low, axis=0) == begin) & below


@triton.jit
def map_run(
    first,
    count,
    entry,
    slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    replay_len_ptr,
    replay_window,
    line_ptr,
    width,
    column_divisor,
    table_ptr,
    lengths_ptr,
    plane,
    max_num_reqs,
    SPAN: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Map `count` tokens from `first` on, of batch entry `entry` at the first, if they are a run.

    A run has one request, a row that exists, consecutive positions and at most WINDOW columns.
    Returns whether the tokens were mapped.
    """
    done = 0
    index = tl.load(idx_mapping_ptr + entry)
    # One unsigned comparison refuses negative rows, too.
    one = (tl.load(query_start_loc_ptr + entry + 1) >= first + count) & (
        index.to(tl.uint64) < max_num_reqs
    )
    if RING & FLAGS:
        one = one & (width > 0)
    if REPLAY & FLAGS:
        if replay_window < 0:
            unreplayed = tl.load(replay_len_ptr + entry) <= 0
        else:
            unreplayed = tl.load(replay_start_ptr + entry) == 0
        one = one & (unreplayed | (tl.load(line_ptr + CACHEABLE) == 0))
    # Not under the `if`, where the result of a reduction costs an event of its own.
    begin, consecutive = run_begins(positions_ptr, first, count, SPAN)
    if one & consecutive:
        row = index.to(tl.int32)
        column_size = size_of(column_divisor, FLAGS)
        column = scalar_quotient(begin, column_divisor, FLAGS)
        within = begin - column * column_size
        last_column = scalar_quotient(within + SPAN - 1, column_divisor, FLAGS)
        if last_column < WINDOW:
            done = 1
            length = tl.load(lengths_ptr + row)
            window = window_of_row(row, column, length, lengths_ptr, plane, table_ptr, width, FLAGS)
            if NULLS & FLAGS:
                read = tl.arange(0, WINDOW) < tl.minimum(length - column, last_column + 1)
                null = tl.where(read, null_columns(window, line_ptr), -1)
                # Others count such tokens one by one.
                done = (tl.max(null, axis=0) < 0).to(tl.int32)
            if done > 0:
                lane = tl.arange(0, SPAN)
                token = within + lane
                of_token = quotient(token, column_divisor, FLAGS)
                slot = (gather_in_tile(window, of_token) - of_token) * column_size + token
                if (length - column > last_column) & (count == SPAN):
                    tl.store(slots_ptr + first + lane, slot.to(slots_ptr.dtype.element_ty))
                else:
                    held = (length - column).to(tl.int64) * column_size - within
                    held = tl.maximum(tl.minimum(held, count), 0).to(tl.int32)
                    # From `held` on all bits are set, which is PAD; a select would cost more.
                    padded = (slot | ((held - 1 - lane) >> 31)).to(slots_ptr.dtype.element_ty)
                    tl.store(slots_ptr + first + lane, padded, mask=lane < count)
                    if held < count:
                        tl.atomic_add(line_ptr + FAULTS + COLUMN_OUT_OF_ROW, count - held)
    return done
