"""The mapping of a tile of tokens to slots, shared by every kernel: device functions only.

For a token at position p of a row, with K, B, n, S', c', I of its group:
    v = p // (K·S'), w = p mod (K·S'), owner = (w // I) mod S'
    local = (w // (S'·I))·I + w mod I, col = v·n + local // B
    slot = table[row, col]·B + local mod B
A ring has col = 0 and slot = table[row, 0]·B + p mod B.
"""

import triton
import triton.language as tl

from fused_slots.kernels.layout import (
    DETAIL_WIDTH,
    FAULT_DETAILS,
    INT32_MAX,
    KIND_NONE,
    KIND_RING,
    PAD,
)


@triton.jit
def quotient(value, divisor, shift, POW2: tl.constexpr):
    """value // divisor for value >= 0; a shift where every divisor of the manager allows it."""
    if POW2:
        return value >> shift
    else:
        return value // divisor


@triton.jit
def remainder(position, size, POW2: tl.constexpr):
    """position mod size as int32, for an int64 position >= 0."""
    if POW2:
        return (position & (size - 1)).to(tl.int32)
    else:
        return (position % size).to(tl.int32)


@triton.jit
def clamp_row(index, max_num_reqs):
    """A row index of any dtype as int32 in [-1, max_num_reqs]."""
    return tl.minimum(tl.maximum(index, -1), max_num_reqs).to(tl.int32)


@triton.jit
def clamp_position(position):
    """An int64 position as int32 in [-1, 2^31 - 1]; no row reaches the upper end."""
    return tl.minimum(tl.maximum(position, -1), INT32_MAX).to(tl.int32)


@triton.jit
def wanted_tokens(
    live,
    row,
    position,
    replay_start,
    kind,
    cacheable,
    max_num_reqs,
    replay_window,
    REPLAY: tl.constexpr,
):
    """Tokens that may get a slot, by the rules that need no table."""
    wanted = live & (row >= 0) & (row < max_num_reqs) & (position >= 0) & (kind != KIND_NONE)
    if REPLAY:
        # position - window cannot overflow; start + window could.
        replayed = (replay_start != 0) & (replay_start <= position) & (cacheable != 0)
        replayed = replayed & (position - replay_window < replay_start)
        wanted = wanted & (replayed == 0)
    return wanted


@triton.jit
def locate(
    place,
    position,
    column_size,
    column_shift,
    virtual_size,
    virtual_shift,
    shards,
    shards_shift,
    rank,
    columns_per_block,
    kind,
    interleave,
    interleave_shift,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
):
    """Column, offset in it, and whether this rank owns the token.

    `place` is the position clamped to [0, 2^31 - 1]. What repeats with the position (its owner,
    its place in a ring) comes from the position itself, however large.
    """
    if SHARDED:
        block = quotient(place, virtual_size, virtual_shift, POW2)
        # One block less where the position was clamped, so that its column cannot overflow.
        block = tl.where(position > INT32_MAX, block - 1, block)
        within_block = remainder(position, virtual_size, POW2)
        run = quotient(within_block, interleave, interleave_shift, POW2)
        stripe = quotient(run, shards, shards_shift, POW2)
        mine = (run - stripe * shards) == rank
        local = stripe * interleave + (within_block - run * interleave)
        block_column = quotient(local, column_size, column_shift, POW2)
        offset = local - block_column * column_size
        column = block * columns_per_block + block_column
    else:
        column = quotient(place, column_size, column_shift, POW2)
        offset = place - column * column_size
        mine = place >= 0
    if RING:
        ring_offset = remainder(position, column_size, POW2)
        offset = tl.where(kind == KIND_RING, ring_offset, offset)
        column = tl.where(kind == KIND_RING, 0, column)
    return column, offset, mine


@triton.jit
def slot_of(block_id, offset, found, column_size, SLOT_DTYPE: tl.constexpr):
    """block_id·B + offset where found, else PAD."""
    slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)
    return tl.where(found, slot, PAD)


@triton.jit
def count_faults(
    faults_ptr,  # int64 [codes + 1, G]
    details_ptr,  # int64 [1 + FAULT_DETAILS * DETAIL_WIDTH]: a ticket counter, then the records
    faulty,
    code,
    g,
    num_groups,
    row,
    token,
    position,
    CHECKED: tl.constexpr,
):
    """Count the faulty lanes; the others cost a predicated-off instruction, no reduction."""
    zero = (token * 0).to(tl.int64)
    tl.atomic_add(faults_ptr + zero + code * num_groups + g, zero + 1, mask=faulty)
    if CHECKED:
        ticket = tl.atomic_add(details_ptr + zero, zero + 1, mask=faulty)
        keep = faulty & (ticket < FAULT_DETAILS)
        record = details_ptr + 1 + tl.where(keep, ticket, 0) * DETAIL_WIDTH
        tl.store(record, zero + code, mask=keep)
        tl.store(record + 1, zero + g, mask=keep)
        tl.store(record + 2, zero + row, mask=keep)
        tl.store(record + 3, zero + token, mask=keep)
        tl.store(record + 4, zero + position, mask=keep)
