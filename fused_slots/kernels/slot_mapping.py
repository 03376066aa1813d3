"""Slots of every token of a batch in every KV cache group, in one launch (formula: mapping.py).

Two ways to deal tokens to programs, the same result whatever the lengths of the requests:

- by token: program x takes tokens [x·TILE, (x+1)·TILE), as token_tiles.py does;
- by request, the base case: program b·tiles + k of the grid (group_count, num_reqs·tiles + 1)
  takes every tiles-th tile of request b.

Further programs of the grid write PAD behind the last token.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.layout import DESCRIPTOR_WIDTH
from fused_slots.kernels.token_tiles import (
    group_numbers,
    map_or_pad,
    map_tile,
)


@triton.jit
def slots_by_token(
    slots_ptr,  # int32 or int64 [G, slots_stride]
    idx_mapping_ptr,  # int32 or int64 [num_reqs]; FLAT: [num_positions], the row of each token
    query_start_loc_ptr,  # int32 [num_reqs + 1]; FLAT: not read
    positions_ptr,  # int64 [num_positions]
    replay_start_ptr,  # int32 [num_reqs]; read if REPLAY
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_tiles,
    num_pad,
    query_len_inverse,
    search_steps,
    descriptor_ptr,  # int32 [G, DESCRIPTOR_WIDTH]
    arena_ptr,  # int32, all groups' tables
    num_columns_ptr,  # int32 [G, max_num_reqs]
    faults_ptr,  # int64 [codes + 1, G]
    details_ptr,  # int64, see count_faults
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    CHECKED: tl.constexpr,
):
    g = tl.program_id(0)
    x = tl.program_id(1)
    map_or_pad(
        x,
        num_tiles,
        num_pad,
        num_positions,
        slots_ptr + g.to(tl.int64) * slots_stride,
        idx_mapping_ptr,
        query_start_loc_ptr,
        positions_ptr,
        replay_start_ptr,
        capacity,
        num_reqs,
        query_len_inverse,
        search_steps,
        g,
        num_groups,
        descriptor_ptr,
        arena_ptr,
        num_columns_ptr,
        faults_ptr,
        details_ptr,
        max_num_reqs,
        interleave,
        interleave_shift,
        replay_window,
        descriptor_ptr,
        0,
        TILE,
        PAD_TILE,
        FLAT,
        POW2,
        SHARDED,
        RING,
        REPLAY,
        False,
        CHECKED,
    )


@triton.jit
def slots_by_request(
    slots_ptr,  # int32 or int64 [G, slots_stride]
    idx_mapping_ptr,  # int32 or int64 [num_reqs]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    positions_ptr,  # int64 [num_positions]
    replay_start_ptr,  # int32 [num_reqs]; read if REPLAY
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    tiles_per_request,
    num_pad,
    descriptor_ptr,  # int32 [G, DESCRIPTOR_WIDTH]
    arena_ptr,  # int32, all groups' tables
    num_columns_ptr,  # int32 [G, max_num_reqs]
    faults_ptr,  # int64 [codes + 1, G]
    details_ptr,  # int64, see count_faults
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    CHECKED: tl.constexpr,
):
    g = tl.program_id(0)
    x = tl.program_id(1)
    given = tl.load(query_start_loc_ptr + num_reqs)
    num_tokens = tl.maximum(tl.minimum(given, tl.minimum(capacity, num_positions)), 0)
    group_slots_ptr = slots_ptr + g.to(tl.int64) * slots_stride
    first_pad = num_reqs * tiles_per_request
    if x >= first_pad:
        if x == first_pad:
            count_cut_tokens(faults_ptr, g, num_groups, given, num_tokens)
        pad_tail(group_slots_ptr, num_tokens, capacity, x - first_pad, num_pad, PAD_TILE)
    else:
        entry = x // tiles_per_request
        begin = tl.load(query_start_loc_ptr + entry)
        # Whatever the offsets are, tokens stay within the output and the positions.
        begin = tl.minimum(tl.maximum(begin, 0), num_tokens)
        end = tl.minimum(tl.load(query_start_loc_ptr + entry + 1), num_tokens)
        index = tl.load(idx_mapping_ptr + entry)
        start = 0
        if REPLAY:
            start = tl.load(replay_start_ptr + entry)
        (
            kind,
            column_shift,
            width,
            table_offset,
            column_size,
            virtual_size,
            virtual_shift,
            shards,
            shards_shift,
            rank,
            columns_per_block,
            cacheable,
        ) = group_numbers(descriptor_ptr + g * DESCRIPTOR_WIDTH)
        first = begin + (x - entry * tiles_per_request) * TILE
        for tile_begin in range(first, end, tiles_per_request * TILE):
            token = tile_begin + tl.arange(0, TILE)
            live = token < end
            position = tl.load(positions_ptr + token, mask=live, other=-1)
            slots = map_tile(
                live,
                index + tl.zeros([TILE], tl.int32),
                token,
                position,
                start,
                g,
                num_groups,
                kind,
                column_shift,
                width,
                table_offset,
                column_size,
                virtual_size,
                virtual_shift,
                shards,
                shards_shift,
                rank,
                columns_per_block,
                cacheable,
                arena_ptr,
                num_columns_ptr,
                faults_ptr,
                details_ptr,
                max_num_reqs,
                interleave,
                interleave_shift,
                replay_window,
                descriptor_ptr,
                0,
                slots_ptr.dtype.element_ty,
                POW2,
                SHARDED,
                RING,
                REPLAY,
                False,
                CHECKED,
            )
            tl.store(group_slots_ptr + token, slots, mask=live)
