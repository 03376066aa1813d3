"""The mapping of a tile of tokens to slots, shared by every GPU kernel: device functions only.

For a token at position p of a row, with K, B, n, S', c', I of its group:
    v = p // (K·S'), w = p mod (K·S'), owner = (w // I) mod S'
    local = (w // (S'·I))·I + w mod I, col = v·n + local // B
    slot = table[row, col]·B + local mod B
A ring has col = 0 and slot = table[row, 0]·B + p mod B.
"""

import triton
import triton.language as tl

from fused_slots.kernels.gpu.structs import Group
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_SHIFT,
    COLUMN_SIZE,
    COLUMNS_PER_BLOCK,
    DESCRIPTOR_WIDTH,
    DETAIL_WIDTH,
    FAULT_DETAILS,
    INT32_MAX,
    KIND,
    KIND_RING,
    KIND_STATE,
    NULL_COLUMN,
    OFFSET,
    PAD,
    RANK,
    SHARDS,
    SHARDS_SHIFT,
    VIRTUAL_SHIFT,
    VIRTUAL_SIZE,
    WIDTH,
)


@triton.jit
def load_group(tables, g):
    """What a tile must know of its group."""
    line = tables.descriptor_ptr + g * DESCRIPTOR_WIDTH
    return Group(
        g,
        tl.load(line + KIND),
        tl.load(line + COLUMN_SHIFT),
        tl.load(line + WIDTH),
        tl.load(line + OFFSET),
        tl.load(line + COLUMN_SIZE),
        tl.load(line + VIRTUAL_SIZE),
        tl.load(line + VIRTUAL_SHIFT),
        tl.load(line + SHARDS),
        tl.load(line + SHARDS_SHIFT),
        tl.load(line + RANK),
        tl.load(line + COLUMNS_PER_BLOCK),
        tl.load(line + CACHEABLE),
        tl.load(line + NULL_COLUMN),
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
def wanted_tokens(live, row, position, replayed, group, tables, choices):
    """Tokens that may get a slot, by the rules that need no table."""
    wanted = live & (row >= 0) & (row < tables.max_num_reqs) & (position >= 0)
    wanted = wanted & (group.kind != KIND_STATE)
    if choices.REPLAY:
        wanted = wanted & ((replayed & (group.cacheable != 0)) == 0)
    return wanted


@triton.jit
def replayed_tokens(position, entry, exists, batch):
    """Whether each token is replayed: start <= position < start + length of its batch entry.

    A replay_window of -1 says that replay_len has the lengths; otherwise it is the length of all,
    and a start of 0 says that nothing is replayed.
    """
    by_entry = batch.replay_window < 0
    start = tl.load(batch.replay_start_ptr + entry, mask=exists, other=0)
    own = tl.load(batch.replay_len_ptr + entry, mask=exists & by_entry, other=0)
    length = tl.where(by_entry, own.to(tl.int64), tl.where(start != 0, batch.replay_window, 0))
    # In int64, since a position may be any and the end may lie beyond int32.
    return (position >= start) & (position < start.to(tl.int64) + length)


@triton.jit
def locate(clamped, position, group, tables, choices):
    """Column, offset in it, and whether this rank owns the token.

    `clamped` is the position held in [0, 2^31 - 1]. What repeats with the position (its owner, its
    offset in a ring) comes from the position itself, however large.
    """
    column_size = group.column_size
    if choices.SHARDED:
        block = quotient(clamped, group.virtual_size, group.virtual_shift, choices.POW2)
        # One block less where the position was clamped, so that its column cannot overflow.
        block = tl.where(position > INT32_MAX, block - 1, block)
        within_block = remainder(position, group.virtual_size, choices.POW2)
        # Ranks take turns of `interleave` tokens; all of them have had one after a stripe.
        turn = quotient(within_block, tables.interleave, tables.interleave_shift, choices.POW2)
        stripe = quotient(turn, group.shards, group.shards_shift, choices.POW2)
        owned = (turn - stripe * group.shards) == group.rank
        local = stripe * tables.interleave + (within_block - turn * tables.interleave)
        block_column = quotient(local, column_size, group.column_shift, choices.POW2)
        offset = local - block_column * column_size
        column = block * group.columns_per_block + block_column
    else:
        column = quotient(clamped, column_size, group.column_shift, choices.POW2)
        offset = clamped - column * column_size
        owned = clamped >= 0
    if choices.RING:
        ring_offset = remainder(position, column_size, choices.POW2)
        offset = tl.where(group.kind == KIND_RING, ring_offset, offset)
        column = tl.where(group.kind == KIND_RING, 0, column)
    return column, offset, owned


@triton.jit
def slot_of(block_id, offset, found, column_size, SLOT_DTYPE: tl.constexpr):
    """block_id·B + offset where found, else PAD."""
    slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)
    return tl.where(found, slot, PAD)


@triton.jit
def count_faults(tables, faulty, code, g, row, token, position, CHECKED: tl.constexpr):
    """Count the faulty lanes; the others cost a predicated-off instruction, no reduction."""
    zero = (token * 0).to(tl.int64)
    counter_ptr = tables.faults_ptr + zero + code * tables.num_groups + g
    tl.atomic_add(counter_ptr, zero + 1, mask=faulty)
    if CHECKED:
        ticket = tl.atomic_add(tables.details_ptr + zero, zero + 1, mask=faulty)
        keep = faulty & (ticket < FAULT_DETAILS)
        record = tables.details_ptr + 1 + tl.where(keep, ticket, 0) * DETAIL_WIDTH
        tl.store(record, zero + code, mask=keep)
        tl.store(record + 1, zero + g, mask=keep)
        tl.store(record + 2, zero + row, mask=keep)
        tl.store(record + 3, zero + token, mask=keep)
        tl.store(record + 4, zero + position, mask=keep)
