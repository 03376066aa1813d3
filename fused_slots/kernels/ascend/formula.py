"""The mapping of a tile of tokens to slots, in the forms that lower well on Ascend.

For a token at position p of a row, with K, B, n, S', c', I of its group:
    v = p // (K·S'), w = p mod (K·S'), owner = (w // I) mod S'
    local = (w // (S'·I))·I + w mod I, col = v·n + local // B
    slot = table[row, col]·B + local mod B
A ring has col = 0 and slot = table[row, 0]·B + p mod B.

Vectors are int32 throughout, since int64 vectors become scalar loops; addresses are made safe by
value, since masked-off lanes are read all the same; faults are summed and counted by one int32
atomic under an if, since other atomics take a lock in program order. Faults have no details here.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.layout import (
    FAULTS,
    INTERLEAVE,
    NULLS,
    POW2,
    REPLAY,
    RING,
    SHARDED,
    STAGED,
)
from fused_slots.kernels.ascend.table import columns_of_tile
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_OUT_OF_ROW,
    COLUMNS_PER_BLOCK,
    INT32_MAX,
    NULL_BLOCK,
    NULL_COLUMN,
    RANK,
    ROW_OUT_OF_RANGE,
    SHARDS,
    VIRTUAL_SIZE,
)

FAR = tl.constexpr(2147483648.0)
FAR_BITS = tl.constexpr(0x4F000000)
"""The bits of 2^31 as a float32."""


@triton.jit
def clamp_positive(value):
    """An int64 as int32 in [0, 2^31 - 1], right where it is >= 0, and a number < 0 where it is.

    A float32 of it tells what the low 32 bits lost.
    """
    low = value.to(tl.int32)
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    far = (low >> 31) | ((FAR_BITS - bits) >> 31)
    return (low | far) & INT32_MAX, bits


@triton.jit
def clamp_int64(value):
    """An int64 as int32 in [-1, 2^31 - 1]."""
    clamped, sign = clamp_positive(value)
    return clamped | (sign >> 31)


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
def load_divisor(line_ptr, FIELD: tl.constexpr, FLAGS: tl.constexpr):
    """A size of a group's line as `quotient` and `product` take it: POW2: its shift."""
    if POW2 & FLAGS:
        return tl.load(line_ptr + FIELD + 1)
    else:
        return tl.load(line_ptr + FIELD)


@triton.jit
def quotient(value, divisor, FLAGS: tl.constexpr):
    """value // divisor for vectors >= 0. The vector unit's float32 quotient may be off by one."""
    if POW2 & FLAGS:
        return value >> divisor
    else:
        result = value // divisor
        left = value - result * divisor
        result += left >> 31
        left += (left >> 31) & divisor
        return result - ((divisor - 1 - left) >> 31)


@triton.jit
def scalar_quotient(value, divisor, FLAGS: tl.constexpr):
    """value // divisor for value >= 0: exact in the scalar unit."""
    if POW2 & FLAGS:
        return value >> divisor
    else:
        return value // divisor


@triton.jit
def size_of(divisor, FLAGS: tl.constexpr):
    """The size that `load_divisor` loaded."""
    if POW2 & FLAGS:
        return 1 << divisor
    else:
        return divisor


@triton.jit
def far_remainder(positions_ptr, first, stop, size, TILE: tl.constexpr):
    """position mod size of a tile of int64 positions, one by one: seldom and in the scalar unit.

    An int64 remainder of a vector would be a scalar loop in every tile.
    """
    lane = tl.arange(0, TILE)
    result = lane * 0
    for number in range(tl.minimum(stop - first, TILE)):
        left = tl.maximum(tl.load(positions_ptr + first + number), 0) % size
        result = tl.where(lane == number, left.to(tl.int32), result)
    return result


@triton.jit
def remainder(
    position, clamped, positions_ptr, first, stop, divisor, TILE: tl.constexpr, FLAGS: tl.constexpr
):
    """position mod size; `clamped` is max(position, 0) held to int32.

    Positions that were loaded are int64; they may be from 2^31 - 1 on, or too far for a quotient
    that is computed in float32.
    """
    if POW2 & FLAGS:
        return position.to(tl.int32) & ((1 << divisor) - 1)
    else:
        result = clamped - quotient(clamped, divisor, FLAGS) * divisor
        if position.dtype == tl.int64:
            highest = tl.max(clamped, axis=0)
            if (highest == INT32_MAX) | (highest >> 22 >= divisor):
                result = far_remainder(positions_ptr, first, stop, divisor, TILE)
        return result


@triton.jit
def place(
    refused, position, clamped, positions_ptr, first, stop, line_ptr, width, column_divisor,
    TILE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Where a tile's positions lie: column and offset; `refused` < 0 also where on another rank.

    RING: a ring's width is given as 0, and its rows have one column.
    """
    column_size = size_of(column_divisor, FLAGS)
    if SHARDED & FLAGS:
        virtual_divisor = load_divisor(line_ptr, VIRTUAL_SIZE, FLAGS)
        within = remainder(
            position, clamped, positions_ptr, first, stop, virtual_divisor, TILE, FLAGS
        )
        interleave_divisor = load_divisor(line_ptr, INTERLEAVE, FLAGS)
        interleave = size_of(interleave_divisor, FLAGS)
        chunk = quotient(within, interleave_divisor, FLAGS)
        shards_divisor = load_divisor(line_ptr, SHARDS, FLAGS)
        stripe = quotient(chunk, shards_divisor, FLAGS)
        owner = chunk - stripe * size_of(shards_divisor, FLAGS)
        distance = owner - tl.load(line_ptr + RANK)
        # By a comparison: signs of both differences crash the compiler for a 950 in some variants.
        refused = refused | (0 - (distance != 0).to(tl.int32))
        local = stripe * interleave + (within - chunk * interleave)
        block_column = quotient(local, column_divisor, FLAGS)
        offset = local - block_column * column_size
        block = quotient(clamped, virtual_divisor, FLAGS)
        # Far positions are in no row; held below 2^24 blocks, their columns cannot wrap.
        column = tl.minimum(block, 16777215) * tl.load(line_ptr + COLUMNS_PER_BLOCK) + block_column
    else:
        column = quotient(clamped, column_divisor, FLAGS)
        offset = clamped - column * column_size
    if RING & FLAGS:
        ring_offset = remainder(
            position, clamped, positions_ptr, first, stop, column_divisor, TILE, FLAGS
        )
        # Without ranks that of other groups' tokens, too, where their column exists.
        offset = tl.where(width == 0, ring_offset, offset) if SHARDED & FLAGS else ring_offset
        column = tl.minimum(column, tl.where(width == 0, 0, INT32_MAX))
    return refused, column, offset


@triton.jit
def count_faults(line_ptr, count, code):
    """Add to a group's counter of this code."""
    if count > 0:
        tl.atomic_add(line_ptr + FAULTS + code, count)


@triton.jit
def replayed_tokens(position, clamped, start, length):
    """start <= position < start + length for positions >= 0, `length` >= 0; clamped: in int32."""
    # clamped - length cannot overflow; start + length could.
    replayed = (start <= clamped) & (clamped - length < start)
    if tl.max(clamped, axis=0) == INT32_MAX:
        # From 2^31 on; those that a replay can reach are below 2^32, and so their low words < 0.
        low = position.to(tl.int32)
        far = (low < 0) | (position.to(tl.float32) > FAR)
        far = far & (clamped == INT32_MAX)
        reached = (low < 0) & (position.to(tl.float32) <= 2.0 * FAR) & (start >= 0)
        reached = reached & (low - start >= 0) & (low - start < length)
        replayed = (replayed & (far == 0)) | (far & reached)
    return replayed


@triton.jit
def null_columns(column_ids, line_ptr):
    """A number >= 0 where a column id (>= 0) is one of the null block's columns, else < 0."""
    ahead = column_ids - tl.load(line_ptr + NULL_COLUMN)
    return tl.minimum(ahead, tl.load(line_ptr + COLUMNS_PER_BLOCK) - 1 - ahead)


@triton.jit
def slots_of_tile(
    row, position, replay_start, replay_len, positions_ptr, first, stop, single, line_ptr, width,
    column_divisor, table_ptr, lengths_ptr, plane, max_num_reqs, SLOT_DTYPE: tl.constexpr,
    TILE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Slots of a tile of tokens of one group, PAD where a token has none; faults are counted.

    Conditions are signs of int32 numbers, which cost an instruction where a comparison costs three.
    """
    clamped, negative = clamp_positive(position)
    DETOUR: tl.constexpr = REPLAY & FLAGS or not POW2 & FLAGS
    if DETOUR:  # Where positions from 2^31 - 1 on take one, negative ones must not seem to be.
        clamped = clamped & ~(negative >> 31)
    beyond = max_num_reqs - 1 - row
    refused = negative | row | beyond
    if REPLAY & FLAGS:
        replayed = replayed_tokens(position, clamped, replay_start, replay_len).to(tl.int32)
        refused = refused | (0 - replayed * tl.load(line_ptr + CACHEABLE))
    refused, column, offset = place(
        refused, position, clamped, positions_ptr, first, stop, line_ptr, width, column_divisor,
        TILE, FLAGS,
    )  # fmt: skip
    filled, block_id = columns_of_tile(
        refused, row, column, single, lengths_ptr, plane, table_ptr, width, max_num_reqs, FLAGS,
    )  # fmt: skip
    missing = filled - 1 - column
    # One reduction for all counts, since each costs an event.
    counts = (missing & ~refused) >> 31
    if (STAGED & FLAGS) == 0:  # In a step the gather counts such rows, once an entry.
        token = first + tl.arange(0, TILE)
        counts += ((beyond & (token - stop)) >> 31) << 8
    refused = refused | missing
    if NULLS & FLAGS:
        null = ~null_columns(block_id, line_ptr)
        counts += ((null & ~refused) >> 31) << 16
        refused = refused | null
    counts = 0 - tl.sum(counts, axis=0)
    count_faults(line_ptr, counts & 0xFF, COLUMN_OUT_OF_ROW)
    if (STAGED & FLAGS) == 0:
        count_faults(line_ptr, counts >> 8 & 0xFF, ROW_OUT_OF_RANGE)
    if NULLS & FLAGS:
        count_faults(line_ptr, counts >> 16, NULL_BLOCK)
    # In int32: the manager refuses pools whose slots leave it. PAD has all bits.
    slot = (block_id * size_of(column_divisor, FLAGS) + offset) | (refused >> 31)
    return slot.to(SLOT_DTYPE)
