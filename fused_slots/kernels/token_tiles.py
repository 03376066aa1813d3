"""Tiles of tokens to slots, and the padding behind them: device functions only (see mapping.py).

A program takes TILE consecutive tokens of one group and finds each token's request itself, so no
mix of short and long requests starves a program.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.layout import (
    CACHEABLE,
    COLUMN_OUT_OF_ROW,
    COLUMN_SHIFT,
    COLUMN_SIZE,
    COLUMNS_PER_BLOCK,
    DESCRIPTOR_WIDTH,
    EMPTY_RING,
    KIND,
    KIND_NONE,
    KIND_RING,
    OFFSET,
    OFFSET_UNIT,
    RANK,
    ROW_OUT_OF_RANGE,
    SHARDS,
    SHARDS_SHIFT,
    VIRTUAL_SHIFT,
    VIRTUAL_SIZE,
    WIDTH,
)
from fused_slots.kernels.mapping import (
    clamp_position,
    clamp_row,
    count_faults,
    locate,
    slot_of,
    wanted_tokens,
)
from fused_slots.kernels.staged import staged_ids, staged_record


@triton.jit
def guess_request(token, idx_mapping_ptr, query_start_loc_ptr, num_reqs, query_len_inverse):
    """Each token's batch entry if all queries are equally long, and what to check it by.

    query_len_inverse is 2^31 over their length where the sizes suggest so, otherwise 0: no guess.

    Returns:
        The entry, its first token and the one behind its last (0 where nothing is guessed), and
        its row (-1 there).
    """
    guess = tl.umulhi((2 * token).to(tl.uint32), query_len_inverse.to(tl.uint32))
    entry = tl.minimum(guess.to(tl.int32), num_reqs - 1)
    exists = (entry >= 0) & (query_len_inverse != 0)
    begin = tl.load(query_start_loc_ptr + entry, mask=exists, other=0)
    end = tl.load(query_start_loc_ptr + entry + 1, mask=exists, other=0)
    index = tl.load(idx_mapping_ptr + entry, mask=exists, other=-1)
    return entry, begin, end, index


@triton.jit
def find_request(
    token,
    entry,
    begin,
    end,
    index,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_reqs,
    query_len_inverse,
    search_steps,
):
    """The batch entry of each token, the last b with query_start_loc[b] <= token, and its row.

    A tile in which each guess is right is done; another one searches. Each step of the search
    narrows the range to an eighth, so that its loads wait for memory together; they are not masked,
    for a GPU has seven predicates. None waits for the number of tokens.
    """
    last = entry == num_reqs - 1
    wrong = (token < begin) | ((token >= end) & (last == 0))
    searching = (entry >= 0) & (wrong | (query_len_inverse == 0))
    misses = 1
    if query_len_inverse != 0:
        misses = tl.max(searching.to(tl.int32), axis=0)
    if misses > 0:
        found = entry * 0
        for step in range(search_steps):
            stride = 1 << (3 * (search_steps - 1 - step))
            passed = found * 0
            for eighth in tl.static_range(1, 8):
                # The entry behind the last request is the number of tokens, above every live one.
                probe = tl.minimum(found + eighth * stride, num_reqs)
                passed += (tl.load(query_start_loc_ptr + probe) <= token).to(tl.int32)
            found += passed * stride
        entry = tl.where(searching, tl.minimum(found, num_reqs - 1), entry)
        index = tl.load(idx_mapping_ptr + entry, mask=entry >= 0, other=-1)
    return entry, index


@triton.jit
def group_numbers(group):
    """What a tile must know of its group, from the group's line of the descriptor."""
    return (
        tl.load(group + KIND),
        tl.load(group + COLUMN_SHIFT),
        tl.load(group + WIDTH),
        tl.load(group + OFFSET),
        tl.load(group + COLUMN_SIZE),
        tl.load(group + VIRTUAL_SIZE),
        tl.load(group + VIRTUAL_SHIFT),
        tl.load(group + SHARDS),
        tl.load(group + SHARDS_SHIFT),
        tl.load(group + RANK),
        tl.load(group + COLUMNS_PER_BLOCK),
        tl.load(group + CACHEABLE),
    )


@triton.jit
def map_tile(
    live,
    index,
    token,
    position,
    replay_start,
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
    packet_ptr,
    num_written_rows,
    SLOT_DTYPE: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Slots of a tile of tokens of one group, PAD where a token has none; faults are counted.

    STAGED: rows that this launch writes are read from the packet of staged writes where they
    change, and from the table where they do not.
    """
    row = clamp_row(index, max_num_reqs)
    place = clamp_position(position)
    wanted = wanted_tokens(
        live,
        row,
        place,
        replay_start,
        kind,
        cacheable,
        max_num_reqs,
        replay_window,
        REPLAY,
    )
    column, offset, mine = locate(
        tl.maximum(place, 0),
        tl.maximum(position, 0),
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
        POW2,
        SHARDED,
        RING,
    )
    wanted = wanted & mine
    safe_row = tl.where(wanted, row, 0)
    filled = tl.load(num_columns_ptr + g * max_num_reqs + safe_row, mask=wanted, other=0)
    first = arena_ptr + table_offset.to(tl.int64) * OFFSET_UNIT
    # The column is held inside the row, so the load does not wait for the row's length.
    element = safe_row.to(tl.int64) * width + tl.minimum(column, width - 1)
    if STAGED:
        record, start, filled, first_id = staged_record(
            packet_ptr, num_written_rows, safe_row, wanted, filled, g, num_groups, max_num_reqs
        )
        staged = wanted & (record >= 0) & (column >= start)
        ids_ptr = staged_ids(packet_ptr, num_written_rows, num_groups, max_num_reqs)
        staged_id = tl.load(
            ids_ptr + (first_id + column - start), mask=staged & (column < filled), other=0
        )
        table_id = tl.load(first + element, mask=wanted & (staged == 0), other=0)
        block_id = tl.where(staged, staged_id, table_id)
    else:
        block_id = tl.load(first + element, mask=wanted, other=0)
    found = wanted & (column < filled)
    missing = wanted & (column >= filled)
    code = tl.where(kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)
    count_faults(
        faults_ptr, details_ptr, missing, code, g, num_groups, index, token, position, CHECKED
    )
    too_large = live & (row >= max_num_reqs) & (kind != KIND_NONE)
    count_faults(
        faults_ptr,
        details_ptr,
        too_large,
        ROW_OUT_OF_RANGE,
        g,
        num_groups,
        index,
        token,
        position,
        CHECKED,
    )
    return slot_of(block_id, offset, found, column_size, SLOT_DTYPE)


@triton.jit
def map_token_tile(
    tile,
    limit,
    group_slots_ptr,
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
    packet_ptr,
    num_written_rows,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Map tokens [tile·TILE, (tile + 1)·TILE) of one group, whichever requests they belong to.

    A warp issues its loads in this order and stops at the first one whose address it does not
    have, so those that wait for nothing come first. The number of tokens is loaded a lane each: as
    a scalar it would be waited for at once. Positions beyond it are never read.
    """
    token = tile * TILE + tl.arange(0, TILE)
    live = token < limit
    if not FLAT:
        live = live & (token < tl.load(query_start_loc_ptr + num_reqs + token * 0))
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
    start = token * 0
    if FLAT:
        index = tl.load(idx_mapping_ptr + token, mask=live, other=-1)
        position = tl.load(positions_ptr + token, mask=live, other=-1)
    else:
        entry, begin, end, index = guess_request(
            token, idx_mapping_ptr, query_start_loc_ptr, num_reqs, query_len_inverse
        )
        position = tl.load(positions_ptr + token, mask=live, other=-1)
        entry, index = find_request(
            token,
            entry,
            begin,
            end,
            index,
            idx_mapping_ptr,
            query_start_loc_ptr,
            num_reqs,
            query_len_inverse,
            search_steps,
        )
        if REPLAY:
            start = tl.load(replay_start_ptr + entry, mask=entry >= 0, other=0)
    slots = map_tile(
        live,
        index,
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
        packet_ptr,
        num_written_rows,
        group_slots_ptr.dtype.element_ty,
        POW2,
        SHARDED,
        RING,
        REPLAY,
        STAGED,
        CHECKED,
    )
    tl.store(group_slots_ptr + token, slots, mask=token < capacity)


@triton.jit
def map_or_pad(
    x,
    num_tiles,
    num_pad,
    num_positions,
    group_slots_ptr,
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
    packet_ptr,
    num_written_rows,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    FLAT: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    STAGED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Program x of a group's token tiles and padding.

    Its own tile comes first and by itself: a loop over tiles would hold its loads back until the
    number of tokens has arrived. More tiles follow only when more tokens come than were planned.
    """
    limit = tl.minimum(capacity, num_positions)
    if x < num_tiles:
        map_token_tile(
            x,
            limit,
            group_slots_ptr,
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
            packet_ptr,
            num_written_rows,
            TILE,
            FLAT,
            POW2,
            SHARDED,
            RING,
            REPLAY,
            STAGED,
            CHECKED,
        )
        given = num_positions if FLAT else tl.load(query_start_loc_ptr + num_reqs)
        num_tokens = tl.minimum(given, limit)
        for tile in range(x + num_tiles, tl.cdiv(num_tokens, TILE), num_tiles):
            map_token_tile(
                tile,
                limit,
                group_slots_ptr,
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
                packet_ptr,
                num_written_rows,
                TILE,
                FLAT,
                POW2,
                SHARDED,
                RING,
                REPLAY,
                STAGED,
                CHECKED,
            )
        if x == 0:
            count_cut_tokens(faults_ptr, g, num_groups, given, num_tokens)
    else:
        given = num_positions if FLAT else tl.load(query_start_loc_ptr + num_reqs)
        # A negative number of tokens leaves all of num_tiles' tiles to them.
        begin = tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) * TILE
        pad_tail(group_slots_ptr, begin, capacity, x - num_tiles, num_pad, PAD_TILE)
