"""Slots of every token of a batch in every KV cache group, in one launch (formula: formula.py).

Two ways to deal tokens to programs, the same result whatever the lengths of the requests:

- by token: program x takes tokens [x·TILE, (x+1)·TILE), as tokens.py does;
- by request, the base case: program b·tiles + k of the grid (group_count, num_reqs·tiles + 1)
  takes every tiles-th tile of request b.

Further programs of the grid write PAD behind the last token. An entry's docstring declares its
arguments, and the backend takes their types from there (fused_slots/backends/entries.py).
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.gpu.formula import load_group, replayed_tokens
from fused_slots.kernels.gpu.structs import Batch, Choices, Output, Packet, Tables
from fused_slots.kernels.gpu.tokens import (
    count_narrow_view,
    count_repeated,
    map_or_pad,
    map_tile,
)


@triton.jit
def slots_by_token(
    slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    replay_len_ptr,
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_tokens_padded,
    replay_window,
    num_tiles,
    num_pad,
    query_len_inverse,
    search_steps,
    descriptor_ptr,
    arena_ptr,
    num_columns_ptr,
    faults_ptr,
    details_ptr,
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    NULLS: tl.constexpr,
    REPLAY: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Map a batch by tiles of consecutive tokens: grid (num_groups, num_tiles + num_pad).

    Args:
        slots_ptr: slot [G, slots_stride], written up to the capacity.
        idx_mapping_ptr: index [num_reqs], each entry's row; FLAT: [num_positions], each token's.
        query_start_loc_ptr: int32 [num_reqs + 1], each entry's first token; FLAT: not read.
        positions_ptr: int64 [num_positions], each token's position in its request.
        replay_start_ptr: int32 [num_reqs], each entry's first replayed position; read if REPLAY.
        replay_len_ptr: int32 [num_reqs], how many follow; read if REPLAY and replay_window is -1.
        slots_stride: int64, elements from one group's slots to the next one's.
        capacity: int32, slots of each group that are written.
        num_reqs: int32, batch entries.
        num_positions: int32, positions that may be read.
        num_tokens_padded: int32, tokens that the caller's view of the slots holds.
        replay_window: int64, replayed tokens of each entry whose replay_start is not 0; -1 = read
            from replay_len_ptr.
        num_tiles: int32, programs of a group that map tokens.
        num_pad: int32, programs of a group that write PAD behind the last tile.
        query_len_inverse: int32, 2^31 / tokens of each entry where the sizes suggest that all have
            as many (its bits as uint32); 0 = no guess.
        search_steps: int32, steps of the search for a token's entry, each to an eighth.
        descriptor_ptr: int32 [G, DESCRIPTOR_WIDTH], each group's numbers (kernels/layout.py).
        arena_ptr: int32 [columns], all groups' tables, each [max_num_reqs, width].
        num_columns_ptr: int32 [G, max_num_reqs], filled columns of each row.
        faults_ptr: int64 [codes + 1, G], counters that are added to.
        details_ptr: int64 [1 + FAULT_DETAILS * DETAIL_WIDTH], a counter of faults, then the first
            ones; used if CHECKED.
        num_groups: int32, G.
        max_num_reqs: int32, rows of each table.
        interleave: int32, consecutive tokens on one context parallel rank.
        interleave_shift: int32, its log2; used if POW2.
        TILE: constant, tokens that a program maps at a time.
        PAD_TILE: constant, slots that a program pads at a time.
        FLAT: constant, the tokens are (row, position) pairs, without entries.
        POW2: constant, every number that positions are divided by is a power of two.
        SHARDED: constant, there is more than one context parallel rank.
        RING: constant, there is a group of rings.
        NULLS: constant, the manager has a null block, which is never written.
        REPLAY: constant, replayed tokens of cacheable groups are PAD.
        CHECKED: constant, the first faults are recorded one by one.
    """
    g = tl.program_id(0)
    batch = Batch(
        idx_mapping_ptr,
        query_start_loc_ptr,
        positions_ptr,
        replay_start_ptr,
        replay_len_ptr,
        replay_window,
        num_reqs,
        num_positions,
        num_tokens_padded,
        query_len_inverse,
        search_steps,
    )
    tables = Tables(
        descriptor_ptr,
        arena_ptr,
        num_columns_ptr,
        faults_ptr,
        details_ptr,
        num_groups,
        max_num_reqs,
        interleave,
        interleave_shift,
    )
    output = Output(slots_ptr + g.to(tl.int64) * slots_stride, capacity, num_tiles, num_pad)
    # Built where it is passed: an assignment makes values of constants.
    map_or_pad(
        tl.program_id(1),
        output,
        batch,
        Packet(descriptor_ptr, 0),
        tables,
        g,
        Choices(FLAT, POW2, SHARDED, RING, REPLAY, False, NULLS, CHECKED),
        TILE,
        PAD_TILE,
    )


@triton.jit
def slots_by_request(
    slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    replay_len_ptr,
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_tokens_padded,
    replay_window,
    tiles_per_request,
    num_pad,
    descriptor_ptr,
    arena_ptr,
    num_columns_ptr,
    faults_ptr,
    details_ptr,
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    NULLS: tl.constexpr,
    REPLAY: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Map a batch by tiles of requests: grid (num_groups, num_reqs·tiles_per_request + num_pad).

    Args:
        slots_ptr: slot [G, slots_stride], written up to the capacity.
        idx_mapping_ptr: index [num_reqs], each entry's row.
        query_start_loc_ptr: int32 [num_reqs + 1], each entry's first token.
        positions_ptr: int64 [num_positions], each token's position in its request.
        replay_start_ptr: int32 [num_reqs], each entry's first replayed position; read if REPLAY.
        replay_len_ptr: int32 [num_reqs], how many follow; read if REPLAY and replay_window is -1.
        slots_stride: int64, elements from one group's slots to the next one's.
        capacity: int32, slots of each group that are written.
        num_reqs: int32, batch entries.
        num_positions: int32, positions that may be read.
        num_tokens_padded: int32, tokens that the caller's view of the slots holds.
        replay_window: int64, replayed tokens of each entry whose replay_start is not 0; -1 = read
            from replay_len_ptr.
        tiles_per_request: int32, programs of a group that share the tokens of each request.
        num_pad: int32, programs of a group that write PAD behind the last token.
        descriptor_ptr: int32 [G, DESCRIPTOR_WIDTH], each group's numbers (kernels/layout.py).
        arena_ptr: int32 [columns], all groups' tables, each [max_num_reqs, width].
        num_columns_ptr: int32 [G, max_num_reqs], filled columns of each row.
        faults_ptr: int64 [codes + 1, G], counters that are added to.
        details_ptr: int64 [1 + FAULT_DETAILS * DETAIL_WIDTH], a counter of faults, then the first
            ones; used if CHECKED.
        num_groups: int32, G.
        max_num_reqs: int32, rows of each table.
        interleave: int32, consecutive tokens on one context parallel rank.
        interleave_shift: int32, its log2; used if POW2.
        TILE: constant, tokens that a program maps at a time.
        PAD_TILE: constant, slots that a program pads at a time.
        POW2: constant, every number that positions are divided by is a power of two.
        SHARDED: constant, there is more than one context parallel rank.
        RING: constant, there is a group of rings.
        NULLS: constant, the manager has a null block, which is never written.
        REPLAY: constant, replayed tokens of cacheable groups are PAD.
        CHECKED: constant, the first faults are recorded one by one.
    """
    g = tl.program_id(0)
    x = tl.program_id(1)
    tables = Tables(
        descriptor_ptr,
        arena_ptr,
        num_columns_ptr,
        faults_ptr,
        details_ptr,
        num_groups,
        max_num_reqs,
        interleave,
        interleave_shift,
    )
    batch = Batch(
        idx_mapping_ptr,
        query_start_loc_ptr,
        positions_ptr,
        replay_start_ptr,
        replay_len_ptr,
        replay_window,
        num_reqs,
        num_positions,
        num_tokens_padded,
        0,
        0,
    )
    given = tl.load(query_start_loc_ptr + num_reqs)
    num_tokens = tl.maximum(tl.minimum(given, tl.minimum(capacity, num_positions)), 0)
    group_slots_ptr = slots_ptr + g.to(tl.int64) * slots_stride
    first_pad = num_reqs * tiles_per_request
    if x >= first_pad:
        if x == first_pad:
            count_cut_tokens(faults_ptr, g, num_groups, given, num_tokens)
            count_narrow_view(tables, g, given, batch)
        # Tokens before the first request's are nobody's.
        before = tl.minimum(tl.maximum(tl.load(query_start_loc_ptr), 0), num_tokens)
        pad_tail(group_slots_ptr, 0, before, x - first_pad, num_pad, PAD_TILE)
        pad_tail(group_slots_ptr, num_tokens, capacity, x - first_pad, num_pad, PAD_TILE)
    else:
        entry = x // tiles_per_request
        begin = tl.load(query_start_loc_ptr + entry)
        # Whatever the offsets are, tokens stay within the output and the positions.
        begin = tl.minimum(tl.maximum(begin, 0), num_tokens)
        end = tl.minimum(tl.load(query_start_loc_ptr + entry + 1), num_tokens)
        index = tl.load(idx_mapping_ptr + entry)
        group = load_group(tables, g)
        first = begin + (x - entry * tiles_per_request) * TILE
        for tile_begin in range(first, end, tiles_per_request * TILE):
            token = tile_begin + tl.arange(0, TILE)
            live = token < end
            position = tl.load(positions_ptr + token, mask=live, other=-1)
            indices = index + tl.zeros([TILE], tl.int32)
            replayed = live
            if REPLAY:
                replayed = replayed_tokens(position, entry, entry >= 0, batch)
            if CHECKED:
                first_token = begin + token * 0
                count_repeated(live, indices, token, position, first_token, batch, group, tables)
            slots = map_tile(
                live,
                indices,
                token,
                position,
                replayed,
                group,
                tables,
                Packet(descriptor_ptr, 0),
                Choices(False, POW2, SHARDED, RING, REPLAY, False, NULLS, CHECKED),
                slots_ptr.dtype.element_ty,
            )
            tl.store(group_slots_ptr + token, slots, mask=live)
