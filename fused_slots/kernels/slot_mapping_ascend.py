"""Slots of every token in every KV cache group, in the forms that lower well on Ascend.

The formula is in mapping.py, its Ascend form in mapping_ascend.py. The grid has one axis, program
p working for group p mod G; every role strides over its work, so any number of programs is right.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.entries_ascend import gather_in_tile
from fused_slots.kernels.layout import (
    COLUMN_SHIFT,
    COLUMN_SIZE,
    DESCRIPTOR_WIDTH,
    KIND,
    OFFSET,
    OFFSET_UNIT,
    WIDTH,
)
from fused_slots.kernels.mapping_ascend import clamp_rows, load_row, map_tile
from fused_slots.kernels.run_ascend import map_run


@triton.jit
def last_at_most(query_start_loc_ptr, num_reqs, token, search_steps):
    """The last batch entry whose first token is at most `token`, by scalars."""
    low = 0
    high = num_reqs
    for _ in range(search_steps):
        middle = (low + high) // 2
        later = tl.load(query_start_loc_ptr + middle) > token
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle)
    return low


@triton.jit
def requests_of_tile(
    first,
    num_tokens,
    idx_mapping_ptr,
    query_start_loc_ptr,
    replay_start_ptr,
    num_reqs,
    max_num_reqs,
    search_steps,
    TILE: tl.constexpr,
    REPLAY: tl.constexpr,
):
    """Row and replay start of each token of a tile.

    Where all queries are equally long, a tile's entries are consecutive and come in one transfer.
    Elsewhere the requests that begin in the tile are laid over one another.
    """
    lane = tl.arange(0, TILE)
    token = first + lane
    length = tl.maximum(num_tokens // tl.maximum(num_reqs, 1), 1)
    base = tl.minimum(first // length, tl.maximum(num_reqs - 1, 0))
    place = tl.minimum((first - base * length + lane) // length, TILE - 1)
    there = lane < num_reqs - base
    begin = tl.load(query_start_loc_ptr + base + lane, mask=there, other=0)
    end = tl.load(query_start_loc_ptr + base + 1 + lane, mask=there, other=0)
    inside = (gather_in_tile(begin, place) <= token) & (token < gather_in_tile(end, place))
    strangers = tl.sum(((token < num_tokens) & (inside == 0)).to(tl.int32), axis=0)
    start = lane * 0
    if strangers == 0:
        row = tl.load(idx_mapping_ptr + base + lane, mask=there, other=-1)
        row = gather_in_tile(clamp_rows(row, max_num_reqs), place)
        if REPLAY:
            start = tl.load(replay_start_ptr + base + lane, mask=there, other=0)
            start = gather_in_tile(start, place)
    else:
        final = tl.minimum(first + TILE, num_tokens) - 1
        b = last_at_most(query_start_loc_ptr, num_reqs, first, search_steps)
        last = last_at_most(query_start_loc_ptr, num_reqs, final, search_steps)
        row = lane * 0 + load_row(idx_mapping_ptr, b, max_num_reqs)
        if REPLAY:
            start = lane * 0 + tl.load(replay_start_ptr + b)
        for following in range(b + 1, last + 1):
            mine = token >= tl.load(query_start_loc_ptr + following)
            row = tl.where(mine, load_row(idx_mapping_ptr, following, max_num_reqs), row)
            if REPLAY:
                start = tl.where(mine, tl.load(replay_start_ptr + following), start)
    return row, start


@triton.jit
def map_mixed(
    tile,
    num_tokens,
    group_slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    words_ptr,
    replay_start_ptr,
    num_reqs,
    search_steps,
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
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Map TILE tokens from `tile` on, whatever their requests and positions."""
    token = tile + tl.arange(0, TILE)
    live = token < num_tokens
    position = tl.load(positions_ptr + token, mask=live, other=-1)
    start = token * 0
    if FLAT:
        row = tl.load(idx_mapping_ptr + token, mask=live, other=-1)
        row = clamp_rows(row, max_num_reqs)
    else:
        row, start = requests_of_tile(
            tile,
            num_tokens,
            idx_mapping_ptr,
            query_start_loc_ptr,
            replay_start_ptr,
            num_reqs,
            max_num_reqs,
            search_steps,
            TILE,
            REPLAY,
        )
    slots = map_tile(
        live,
        row,
        position,
        start,
        tile,
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
        group_slots_ptr.dtype.element_ty,
        TILE,
        POW2,
        SHARDED,
        RING,
        REPLAY,
        STAGED,
    )
    tl.store(group_slots_ptr + token, slots, mask=live)


@triton.jit
def map_spans(
    x,
    num_tiles,
    num_tokens,
    group_slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    words_ptr,
    replay_start_ptr,
    num_reqs,
    search_steps,
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
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Map every num_tiles-th span of tokens of one group, from span x on.

    A span of several tiles is mapped whole if it is a run of one request, else tile by tile.
    """
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    kind = tl.load(group + KIND)
    width = tl.load(group + WIDTH)
    column_shift = tl.load(group + COLUMN_SHIFT)
    column_size = 1 << column_shift if POW2 else tl.load(group + COLUMN_SIZE)
    table_ptr = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    filled_ptr += g * max_num_reqs
    starts_ptr += g * max_num_reqs
    bases_ptr += g * max_num_reqs
    for first in range(x * SPAN, num_tokens, num_tiles * SPAN):
        if SPAN > TILE:
            mapped = map_run(
                first,
                tl.minimum(num_tokens - first, SPAN),
                last_at_most(query_start_loc_ptr, num_reqs, first, search_steps),
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
                SPAN,
                POW2,
                REPLAY,
                STAGED,
            )
            # Under an if, since the compiler moves what tiles share in front of their loop.
            if mapped == 0:
                for tile in range(first, tl.minimum(first + SPAN, num_tokens), TILE):
                    map_mixed(
                        tile,
                        num_tokens,
                        group_slots_ptr,
                        idx_mapping_ptr,
                        query_start_loc_ptr,
                        positions_ptr,
                        words_ptr,
                        replay_start_ptr,
                        num_reqs,
                        search_steps,
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
                        TILE,
                        FLAT,
                        POW2,
                        SHARDED,
                        RING,
                        REPLAY,
                        STAGED,
                    )
        else:
            map_mixed(
                first,
                num_tokens,
                group_slots_ptr,
                idx_mapping_ptr,
                query_start_loc_ptr,
                positions_ptr,
                words_ptr,
                replay_start_ptr,
                num_reqs,
                search_steps,
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
                TILE,
                FLAT,
                POW2,
                SHARDED,
                RING,
                REPLAY,
                STAGED,
            )


@triton.jit
def slots_on_ascend(
    slots_ptr,  # int32 or int64 [G, slots_stride]
    idx_mapping_ptr,  # int32 or int64 [num_reqs]; FLAT: [num_positions], the row of each token
    query_start_loc_ptr,  # int32 [num_reqs + 1]; FLAT: not read
    positions_ptr,  # int64 [num_positions]
    words_ptr,  # int32 [2 * num_positions], the same memory
    replay_start_ptr,  # int32 [num_reqs]; read if REPLAY
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_tiles,
    num_pad,
    search_steps,
    descriptor_ptr,  # int32 [G, DESCRIPTOR_WIDTH]
    arena_ptr,  # int32, all groups' tables
    num_columns_ptr,  # int32 [G, max_num_reqs]
    faults_ptr,  # int32 [codes + 1, G]
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    SPAN: tl.constexpr,  # tokens that a program takes at a time
    TILE: tl.constexpr,  # the same where requests or positions are mixed
    PAD_TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
):
    program = tl.program_id(0)
    x = program // num_groups
    g = program % num_groups
    given = num_positions if FLAT else tl.load(query_start_loc_ptr + num_reqs)
    num_tokens = tl.minimum(given, tl.minimum(capacity, num_positions))
    group_slots_ptr = slots_ptr + g.to(tl.int64) * slots_stride
    if x >= num_tiles:
        if x == num_tiles:
            count_cut_tokens(faults_ptr, g, num_groups, given, num_tokens)
        begin = tl.maximum(num_tokens, 0)
        pad_tail(group_slots_ptr, begin, capacity, x - num_tiles, num_pad, PAD_TILE)
    else:
        map_spans(
            x,
            num_tiles,
            num_tokens,
            group_slots_ptr,
            idx_mapping_ptr,
            query_start_loc_ptr,
            positions_ptr,
            words_ptr,
            replay_start_ptr,
            num_reqs,
            search_steps,
            g,
            num_groups,
            descriptor_ptr,
            arena_ptr,
            num_columns_ptr,
            num_columns_ptr,
            num_columns_ptr,
            arena_ptr,
            faults_ptr,
            max_num_reqs,
            interleave,
            interleave_shift,
            replay_window,
            SPAN,
            TILE,
            FLAT,
            POW2,
            SHARDED,
            RING,
            REPLAY,
            False,
        )
