"""The mapping of a tile of tokens to slots, in the forms that lower well on Ascend.

The same formula as mapping.py. What differs, and why: vectors are int32 throughout, since int64
vectors become scalar loops; addresses are contiguous where they can be, since a computed address
costs a scalar load and some seven scalar operations a token; addresses are made safe by value,
since masked-off lanes are read all the same; faults are summed and counted by one int32 atomic
under an if, since other atomics take a lock in program order. Faults have no details here.
"""

import triton
import triton.language as tl

from fused_slots.kernels.entries_ascend import gather_in_tile, table_entries
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_OUT_OF_ROW,
    COLUMNS_PER_BLOCK,
    EMPTY_RING,
    INT32_MAX,
    KIND_NONE,
    KIND_RING,
    PAD,
    RANK,
    ROW_OUT_OF_RANGE,
    SHARDS,
    SHARDS_SHIFT,
    VIRTUAL_SHIFT,
    VIRTUAL_SIZE,
)

FAR = tl.constexpr(2147483648.0)


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
def far_remainder(words_ptr, first, num_tokens, size, TILE: tl.constexpr):
    """position mod size of a tile of int64 positions >= 0, from their two words, bit by bit.

    An int64 remainder would be a scalar loop, and so would be taking the high word from an int64.
    """
    word = 2 * first + tl.arange(0, 2 * TILE)
    words = tl.load(words_ptr + word, mask=word < 2 * num_tokens, other=0)
    lane = tl.arange(0, TILE)
    result = lane * 0
    for half in range(2):
        bits = gather_in_tile(words, 2 * lane + 1 - half)
        for step in range(32):
            # 2 * result + bit - size in [-size, size), without leaving int32 on the way.
            left = (result - size) + result + ((bits >> (31 - step)) & 1)
            result = left + ((left >> 31) & size)
    return result


@triton.jit
def remainder(
    position, place, words_ptr, first, num_tokens, size, shift,
    TILE: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """position mod size of an int64 position >= 0; `place` is it clamped to int32."""
    if POW2:
        return position.to(tl.int32) & (size - 1)
    else:
        result = place - quotient(place, size, shift, POW2) * size
        if tl.max(place, axis=0) == INT32_MAX:
            result = far_remainder(words_ptr, first, num_tokens, size, TILE)
        return result


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
    first_token,
    num_tokens,
    words_ptr,
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
    interleave,
    interleave_shift,
    replay_window,
    SLOT_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Slots of a tile of tokens of one group, PAD where a token has none; faults are counted."""
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
        within = remainder(
            position, place, words_ptr, first_token, num_tokens, virtual_size, virtual_shift,
            TILE, POW2,
        )  # fmt: skip
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
        ring_offset = remainder(
            position, place, words_ptr, first_token, num_tokens, column_size, column_shift,
            TILE, POW2,
        )  # fmt: skip
        offset = tl.where(kind == KIND_RING, ring_offset, offset)
        column = tl.where(kind == KIND_RING, 0, column)
    filled, block_id = table_entries(
        wanted,
        tl.where(wanted, row, 0),
        tl.minimum(tl.maximum(column, 0), width - 1),
        filled_ptr,
        starts_ptr,
        bases_ptr,
        ids_ptr,
        table_ptr,
        width,
        max_num_reqs,
        STAGED,
    )
    code = tl.where(kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)
    count_faults(faults_ptr, wanted & (column >= filled), code, g, num_groups)
    strange = live & (row >= max_num_reqs) & (kind != KIND_NONE)
    count_faults(faults_ptr, strange, ROW_OUT_OF_RANGE, g, num_groups)
    # In int32: the manager refuses pools whose slots leave it.
    slot = tl.where(wanted & (column < filled), block_id * column_size + offset, PAD)
    return slot.to(SLOT_DTYPE)
