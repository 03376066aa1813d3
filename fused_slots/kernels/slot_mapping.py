"""Slots of every token of a batch in every KV cache group, in one launch (formula: mapping.py).

Two ways to deal tokens to programs, the same result whatever the contents:

- by token: program x takes tokens [x·TILE, (x+1)·TILE) and finds each token's request itself, so
  no mix of short and long requests starves a program;
- by request, the base case: program b·tiles + k of the grid (group_count, num_reqs·tiles + 1)
  takes every tiles-th tile of request b.

Further programs of the grid write PAD behind the last token.
"""

import triton
import triton.language as tl

from fused_slots.kernels.descriptor import (
    CACHEABLE,
    COLUMN_SHIFT,
    COLUMN_SIZE,
    COLUMNS_PER_BLOCK,
    DESCRIPTOR_WIDTH,
    KIND,
    KIND_NONE,
    KIND_RING,
    OFFSET,
    OFFSET_UNIT,
    RANK,
    SHARDS,
    SHARDS_SHIFT,
    VIRTUAL_SHIFT,
    VIRTUAL_SIZE,
    WIDTH,
)
from fused_slots.kernels.mapping import (
    COLUMN_OUT_OF_ROW,
    EMPTY_RING,
    PAD,
    ROW_OUT_OF_RANGE,
    TOKENS_OVER_CAPACITY,
    clamp_position,
    clamp_row,
    count_faults,
    locate,
    slot_of,
    wanted_tokens,
)


@triton.jit
def find_request(token, query_start_loc_ptr, num_reqs, query_len_inverse, search_steps):
    """The batch entry of each token: the last b with query_start_loc[b] <= token.

    Where the sizes suggest that all queries are equally long (query_len_inverse is 2^31 over that
    length, otherwise 0), the entry is guessed, two loads confirm it, and a tile with a miss
    searches. Each step of the search narrows the range to an eighth, so that its loads wait for
    memory together. Neither waits for the number of tokens.
    """
    searching = token >= 0
    entry = token * 0
    misses = 1
    if query_len_inverse != 0:
        # token // query_len
        guess = tl.umulhi((2 * token).to(tl.uint32), query_len_inverse.to(tl.uint32))
        entry = tl.minimum(guess.to(tl.int32), num_reqs - 1)
        exists = entry >= 0
        begin = tl.load(query_start_loc_ptr + entry, mask=exists, other=0)
        end = tl.load(query_start_loc_ptr + entry + 1, mask=exists, other=0)
        last = exists & (entry == num_reqs - 1)
        searching = exists & ((token < begin) | ((token >= end) & (last == 0)))
        misses = tl.max(searching.to(tl.int32), axis=0)
    if misses > 0:
        entry = tl.where(searching, 0, entry)
        for step in range(search_steps):
            stride = 1 << (3 * (search_steps - 1 - step))
            passed = entry * 0
            for eighth in tl.static_range(1, 8):
                probe = entry + eighth * stride
                inside = searching & (probe < num_reqs)
                first = tl.load(query_start_loc_ptr + probe, mask=inside, other=0)
                passed += (inside & (first <= token)).to(tl.int32)
            entry += passed * stride
    return entry


@triton.jit
def staged_record(packet_ptr, num_written_rows, row, live, filled, g, num_groups, max_num_reqs):
    """What this launch writes to each row of one group.

    Packet, int32: index [max_num_reqs] (the row's record, -1 = none), then num_written_rows lines
    [row, generation], then [num_written_rows, G, 3] records [start, filled, first id], then ids.

    Returns:
        The row's record (-1 = it is not written), its first written column, its filled columns
        after the launch, and the address of its ids.
    """
    record = tl.load(packet_ptr + row, mask=live & (num_written_rows > 0), other=-1)
    written = record >= 0
    records_ptr = packet_ptr + max_num_reqs + 2 * num_written_rows
    fields_ptr = records_ptr + (tl.maximum(record, 0) * num_groups + g) * 3
    start = tl.load(fields_ptr, mask=written, other=0)
    filled = tl.where(written, tl.load(fields_ptr + 1, mask=written, other=0), filled)
    first_id = tl.load(fields_ptr + 2, mask=written, other=0)
    return record, start, filled, records_ptr + num_written_rows * num_groups * 3 + first_id


@triton.jit
def map_tile(
    live,
    index,
    token,
    position,
    replay_start,
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
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    kind = tl.load(group + KIND)
    width = tl.load(group + WIDTH)
    column_size = tl.load(group + COLUMN_SIZE)
    row = clamp_row(index, max_num_reqs)
    place = clamp_position(position)
    wanted = wanted_tokens(
        live,
        row,
        place,
        replay_start,
        kind,
        tl.load(group + CACHEABLE),
        max_num_reqs,
        replay_window,
        REPLAY,
    )
    column, offset, mine = locate(
        tl.maximum(place, 0),
        tl.maximum(position, 0),
        column_size,
        tl.load(group + COLUMN_SHIFT),
        tl.load(group + VIRTUAL_SIZE),
        tl.load(group + VIRTUAL_SHIFT),
        tl.load(group + SHARDS),
        tl.load(group + SHARDS_SHIFT),
        tl.load(group + RANK),
        tl.load(group + COLUMNS_PER_BLOCK),
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
    first = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    # The column is held inside the row, so the load does not wait for the row's length.
    element = safe_row.to(tl.int64) * width + tl.minimum(column, width - 1)
    if STAGED:
        record, start, filled, ids = staged_record(
            packet_ptr, num_written_rows, safe_row, wanted, filled, g, num_groups, max_num_reqs
        )
        staged = wanted & (record >= 0) & (column >= start)
        staged_id = tl.load(ids + (column - start), mask=staged & (column < filled), other=0)
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
    num_tokens,
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

    Only the positions wait for the number of tokens; what lies beyond is never read.
    """
    token = tile * TILE + tl.arange(0, TILE)
    live = token < num_tokens
    start = token * 0
    if FLAT:
        index = tl.load(idx_mapping_ptr + token, mask=live, other=-1)
    else:
        entry = find_request(token, query_start_loc_ptr, num_reqs, query_len_inverse, search_steps)
        index = tl.load(idx_mapping_ptr + entry, mask=(entry >= 0) & (num_reqs > 0), other=-1)
        if REPLAY:
            start = tl.load(replay_start_ptr + entry, mask=live, other=0)
    position = tl.load(positions_ptr + token, mask=live, other=-1)
    slots = map_tile(
        live,
        index,
        token,
        position,
        start,
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
    given,
    num_tokens,
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
    if x < num_tiles:
        map_token_tile(
            x,
            num_tokens,
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
        for tile in range(x + num_tiles, tl.cdiv(num_tokens, TILE), num_tiles):
            map_token_tile(
                tile,
                num_tokens,
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
        begin = tl.maximum(tl.cdiv(num_tokens, TILE), num_tiles) * TILE
        pad_tail(group_slots_ptr, begin, capacity, x - num_tiles, num_pad, PAD_TILE)


@triton.jit
def pad_tail(slots_ptr, begin, capacity, program, num_programs, PAD_TILE: tl.constexpr):
    """Write PAD to [begin, capacity), dealt to num_programs programs."""
    lanes = tl.arange(0, PAD_TILE)
    for start in range(begin + program * PAD_TILE, capacity, num_programs * PAD_TILE):
        token = start + lanes
        value = tl.full([PAD_TILE], PAD, slots_ptr.dtype.element_ty)
        tl.store(slots_ptr + token, value, mask=token < capacity)


@triton.jit
def count_cut_tokens(faults_ptr, g, num_groups, given, mapped):
    """Count the tokens that the batch names and the output or the positions do not hold."""
    if given > mapped:
        counter = faults_ptr + TOKENS_OVER_CAPACITY * num_groups + g
        tl.atomic_add(counter, (given - mapped).to(tl.int64))


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
    given = num_positions if FLAT else tl.load(query_start_loc_ptr + num_reqs)
    num_tokens = tl.maximum(tl.minimum(given, tl.minimum(capacity, num_positions)), 0)
    map_or_pad(
        x,
        num_tiles,
        num_pad,
        given,
        num_tokens,
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
        end = tl.minimum(tl.load(query_start_loc_ptr + entry + 1), num_tokens)
        index = tl.load(idx_mapping_ptr + entry)
        start = 0
        if REPLAY:
            start = tl.load(replay_start_ptr + entry)
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
                slots_ptr.dtype.element_ty,
                POW2,
                SHARDED,
                RING,
                REPLAY,
                False,
                CHECKED,
            )
            tl.store(group_slots_ptr + token, slots, mask=live)
