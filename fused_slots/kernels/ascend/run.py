"""Slots of a run, consecutive positions of one request: prefill, at a fraction of the general cost.

Only what a lane adds to the first position is left to vectors; request and column of the first
token are scalars. A run has no faults: where there may be one, tokens are mapped tile by tile.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import (
    load_divisor,
    null_columns,
    place,
    quotient,
    scalar_quotient,
    size_of,
)
from fused_slots.kernels.ascend.layout import (
    INTERLEAVE,
    NULLS,
    POW2,
    REPLAY,
    RING,
    SHARDED,
    STAGED,
    WINDOW,
)
from fused_slots.kernels.ascend.table import gather_in_tile, window_of_row
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMNS_PER_BLOCK,
    INT32_MAX,
    SHARDS,
    VIRTUAL_SIZE,
)

FAR_SQUARED = tl.constexpr(0x5E800000)
"""The bits of 2^62 as a float32."""


@triton.jit
def map_run(
    first, count, entry, slots_ptr, idx_mapping_ptr, positions_ptr, num_positions, replay_start_ptr,
    replay_len_ptr, replay_window, line_ptr, width, column_divisor, table_ptr, lengths_ptr, plane,
    max_num_reqs, SPAN: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Map `count` tokens from `first` on, all of one batch entry, if they are a run.

    A run has a row that exists and holds its columns, at most WINDOW, and consecutive positions.
    Returns whether the tokens were mapped.
    """
    lane = tl.arange(0, SPAN)
    # SPAN positions where there are so many: a shorter transfer waits for what fills its rest.
    base = tl.maximum(tl.minimum(first, num_positions - SPAN), 0)
    of_run = tl.minimum(lane, count - 1) + (first - base)
    position = tl.load(positions_ptr + base + lane, mask=lane < num_positions - base, other=0)
    low = position.to(tl.int32)
    # What the low words lose a float32 tells: the bits of its square grow as its magnitude does.
    rounded = position.to(tl.float32)
    square = (rounded * rounded).to(tl.int32, bitcast=True)
    if STAGED & FLAGS:  # One reduction less, for which a step has no event left.
        low = low | ((square + (INT32_MAX - FAR_SQUARED)) >> 31)
    low = gather_in_tile(low - lane, of_run)
    # Scalars are loaded while the vector unit works.
    index = tl.load(idx_mapping_ptr + entry)
    # One unsigned comparison refuses negative rows, too.
    one = index.to(tl.uint64) < max_num_reqs
    row = tl.where(one, index, 0).to(tl.int32)
    length = tl.load(lengths_ptr + row)
    if REPLAY & FLAGS:
        if replay_window < 0:
            unreplayed = tl.load(replay_len_ptr + entry) <= 0
        else:
            unreplayed = tl.load(replay_start_ptr + entry) == 0
        one = one & (unreplayed | (tl.load(line_ptr + CACHEABLE) == 0))
    # Not under the `if`, where the result of a reduction costs an event of its own.
    lowest = tl.min(low, axis=0)
    one = one & (tl.max(low, axis=0) == lowest)
    begin = lowest + (first - base)
    if (STAGED & FLAGS) == 0:
        one = one & (tl.max(square, axis=0) < FAR_SQUARED)
    done = 0
    # Positions behind the run's last, which are computed, too, stay below 2^31, and quotients by
    # vectors of the positions themselves exact.
    END: tl.constexpr = 1 << 24 if SHARDED & FLAGS and not POW2 & FLAGS else INT32_MAX
    if one & (begin >= 0) & (begin < END - 2 * SPAN):
        done = slots_of_run(
            begin, first, count, row, length, slots_ptr, positions_ptr, line_ptr, width,
            column_divisor, table_ptr, lengths_ptr, plane, SPAN, FLAGS,
        )  # fmt: skip
    return done


@triton.jit
def columns_of_stripe(position, line_ptr, column_divisor, FLAGS: tl.constexpr):
    """The first and the last column that a rank's tokens of a position's stripe have."""
    virtual_divisor = load_divisor(line_ptr, VIRTUAL_SIZE, FLAGS)
    interleave_divisor = load_divisor(line_ptr, INTERLEAVE, FLAGS)
    interleave = size_of(interleave_divisor, FLAGS)
    block = scalar_quotient(position, virtual_divisor, FLAGS)
    within = position - block * size_of(virtual_divisor, FLAGS)
    chunk = scalar_quotient(within, interleave_divisor, FLAGS)
    local = scalar_quotient(chunk, load_divisor(line_ptr, SHARDS, FLAGS), FLAGS) * interleave
    column = block * tl.load(line_ptr + COLUMNS_PER_BLOCK)
    first = column + scalar_quotient(local, column_divisor, FLAGS)
    return first, column + scalar_quotient(local + interleave - 1, column_divisor, FLAGS)


@triton.jit
def slots_of_run(
    begin, first, count, row, length, slots_ptr, positions_ptr, line_ptr, width, column_divisor,
    table_ptr, lengths_ptr, plane, SPAN: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Map a run from position `begin` on, if its row has the columns and a window holds them.

    What lies behind the run is computed, too, and not stored.
    """
    lane = tl.arange(0, SPAN)
    column_size = size_of(column_divisor, FLAGS)
    if SHARDED & FLAGS:
        position = begin + lane
        refused, column, offset = place(
            lane * 0, position, position, positions_ptr, first, first + count, line_ptr, width,
            column_divisor, SPAN, FLAGS,
        )  # fmt: skip
        lowest, _ = columns_of_stripe(begin, line_ptr, column_divisor, FLAGS)
        _, last = columns_of_stripe(begin + count - 1, line_ptr, column_divisor, FLAGS)
        _, spread = columns_of_stripe(begin + SPAN - 1, line_ptr, column_divisor, FLAGS)
        spread -= lowest
    else:
        lowest = scalar_quotient(begin, column_divisor, FLAGS)
        within = begin - lowest * column_size
        spread = scalar_quotient(within + SPAN - 1, column_divisor, FLAGS)
        last = lowest + scalar_quotient(within + count - 1, column_divisor, FLAGS)
    if RING & FLAGS:  # It has one column, of which the window then holds copies.
        lowest = tl.where(width == 0, 0, lowest)
        last = tl.where(width == 0, 0, last)
    done = ((spread < WINDOW) & (last < length)).to(tl.int32)
    if done > 0:
        stride = tl.maximum(width, 1) if RING & FLAGS else width
        window = window_of_row(row, lowest, length, lengths_ptr, plane, table_ptr, stride, FLAGS)
        number = tl.arange(0, WINDOW)
        if NULLS & FLAGS:
            null = tl.where(number <= last - lowest, null_columns(window, line_ptr), -1)
            # Others count such tokens one by one.
            done = (tl.max(null, axis=0) < 0).to(tl.int32)
        if done > 0:
            if SHARDED & FLAGS:
                slot = gather_in_tile(window, column - lowest) * column_size + offset
                slot = slot | (refused >> 31)
            else:
                token = within + lane
                of_token = quotient(token, column_divisor, FLAGS)
                if RING & FLAGS:
                    most = tl.where(width == 0, 0, WINDOW - 1)
                    window = gather_in_tile(window, tl.minimum(number, most))
                # What a column's tokens have in common is computed once a column.
                common = (window - number) * column_size
                slot = gather_in_tile(common, of_token) + token
            slot = slot.to(slots_ptr.dtype.element_ty)
            tl.store(slots_ptr + first + lane, slot, mask=lane < count)
    return done
