"""Tiles of tokens to slots, and the padding behind them: device functions only (see formula.py).

A program takes TILE consecutive tokens of one group and finds each token's request itself, so no
mix of short and long requests starves a program. In the base case it takes tiles of one request.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.gpu.formula import (
    clamp_position,
    clamp_row,
    count_faults,
    load_group,
    locate,
    replayed_tokens,
    slot_of,
    wanted_tokens,
)
from fused_slots.kernels.gpu.staged import staged_ids, staged_record
from fused_slots.kernels.layout import (
    COLUMN_OUT_OF_ROW,
    DUPLICATE_POSITION,
    EMPTY_RING,
    KIND_RING,
    KIND_STATE,
    NULL_BLOCK,
    OFFSET_UNIT,
    ROW_OUT_OF_RANGE,
    TOKENS_OVER_VIEW,
)


@triton.jit
def guess_request(token, batch):
    """Each token's batch entry if all queries are equally long, and what to check it by.

    query_len_inverse is 2^31 over their length where the sizes suggest so, otherwise 0: no guess.

    Returns:
        The entry, its first token and the one behind its last (0 where nothing is guessed), and
        its row (-1 there).
    """
    guess = tl.umulhi((2 * token).to(tl.uint32), batch.query_len_inverse.to(tl.uint32))
    entry = tl.minimum(guess.to(tl.int32), batch.num_reqs - 1)
    exists = (entry >= 0) & (batch.query_len_inverse != 0)
    begin = tl.load(batch.query_start_loc_ptr + entry, mask=exists, other=0)
    end = tl.load(batch.query_start_loc_ptr + entry + 1, mask=exists, other=0)
    index = tl.load(batch.idx_mapping_ptr + entry, mask=exists, other=-1)
    return entry, begin, end, index


@triton.jit
def find_request(token, entry, begin, end, index, batch):
    """The batch entry of each token, the last b with query_start_loc[b] <= token, and its row.

    A tile in which each guess is right is done; another one searches. Each step of the search
    narrows the range to an eighth, so that its loads wait for memory together; they are not masked,
    for a GPU has seven predicates. None waits for the number of tokens.
    """
    last = entry == batch.num_reqs - 1
    wrong = (token < begin) | ((token >= end) & (last == 0))
    searching = (entry >= 0) & (wrong | (batch.query_len_inverse == 0))
    misses = 1
    if batch.query_len_inverse != 0:
        misses = tl.max(searching.to(tl.int32), axis=0)
    if misses > 0:
        found = entry * 0
        for step in range(batch.search_steps):
            stride = 1 << (3 * (batch.search_steps - 1 - step))
            passed = found * 0
            for eighth in tl.static_range(1, 8):
                # The entry behind the last request is the number of tokens, above every live one.
                probe = tl.minimum(found + eighth * stride, batch.num_reqs)
                passed += (tl.load(batch.query_start_loc_ptr + probe) <= token).to(tl.int32)
            found += passed * stride
        entry = tl.where(searching, tl.minimum(found, batch.num_reqs - 1), entry)
        # Tokens before the first request's are nobody's.
        entry = tl.where(token < tl.load(batch.query_start_loc_ptr), -1, entry)
        index = tl.load(batch.idx_mapping_ptr + entry, mask=entry >= 0, other=-1)
    return entry, index


@triton.jit
def map_tile(live, index, token, position, replayed, group, tables, packet, output, choices):
    """Slots of a tile of tokens of one group, PAD where a token has none; faults are counted.

    STAGED: rows that this launch writes are read from the packet of staged writes where they
    change, and from the table where they do not.
    """
    g, max_num_reqs = group.number, tables.max_num_reqs
    row = clamp_row(index, max_num_reqs)
    clamped = clamp_position(position)
    wanted = wanted_tokens(live, row, clamped, replayed, group, tables, choices)
    column, offset, owned = locate(
        tl.maximum(clamped, 0), tl.maximum(position, 0), group, tables, choices
    )
    wanted = wanted & owned
    safe_row = tl.where(wanted, row, 0)
    filled = tl.load(tables.num_columns_ptr + g * max_num_reqs + safe_row, mask=wanted, other=0)
    table_ptr = tables.arena_ptr + group.table_offset.to(tl.int64) * OFFSET_UNIT
    # The column is held inside the row, so the load does not wait for the row's length.
    element = safe_row.to(tl.int64) * group.width + tl.minimum(column, group.width - 1)
    if choices.STAGED:
        record, start, filled, first_id = staged_record(packet, safe_row, wanted, filled, g, tables)
        staged = wanted & (record >= 0) & (column >= start)
        staged_id = tl.load(
            staged_ids(packet, tables) + (first_id + column - start),
            mask=staged & (column < filled),
            other=0,
        )
        table_id = tl.load(table_ptr + element, mask=wanted & (staged == 0), other=0)
        block_id = tl.where(staged, staged_id, table_id)
    else:
        block_id = tl.load(table_ptr + element, mask=wanted, other=0)
    found = wanted & (column < filled)
    if choices.NULLS:
        null = found & (block_id >= group.null_column)
        null = null & (block_id - group.null_column < group.columns_per_block)
        found = found & (null == 0)
        count_faults(tables, null, NULL_BLOCK, g, index, token, position, choices.CHECKED)
    missing = wanted & (column >= filled)
    code = tl.where(group.kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)
    count_faults(tables, missing, code, g, index, token, position, choices.CHECKED)
    if not choices.STAGED:  # In a step the gather counts such rows, once an entry.
        too_large = live & (row >= max_num_reqs) & (group.kind != KIND_STATE)
        count_faults(
            tables, too_large, ROW_OUT_OF_RANGE, g, index, token, position, choices.CHECKED
        )
    SLOT_DTYPE: tl.constexpr = output.slots_ptr.dtype.element_ty
    return slot_of(block_id, offset, found, group.column_size, SLOT_DTYPE)


@triton.jit
def map_token_tile(tile, limit, output, batch, packet, tables, g, choices, TILE: tl.constexpr):
    """Map tokens [tile·TILE, (tile + 1)·TILE) of one group, whichever requests they belong to.

    A warp issues its loads in this order and stops at the first one whose address it does not
    have, so those that wait for nothing come first. The number of tokens is loaded a lane each: as
    a scalar it would be waited for at once. Positions beyond it are never read.
    """
    token = tile * TILE + tl.arange(0, TILE)
    live = token < limit
    if not choices.FLAT:
        live = live & (token < tl.load(batch.query_start_loc_ptr + batch.num_reqs + token * 0))
    group = load_group(tables, g)
    replayed = live
    if choices.FLAT:
        index = tl.load(batch.idx_mapping_ptr + token, mask=live, other=-1)
        position = tl.load(batch.positions_ptr + token, mask=live, other=-1)
    else:
        entry, begin, end, index = guess_request(token, batch)
        position = tl.load(batch.positions_ptr + token, mask=live, other=-1)
        entry, index = find_request(token, entry, begin, end, index, batch)
        if choices.REPLAY:
            replayed = replayed_tokens(position, entry, entry >= 0, batch)
        if choices.CHECKED:
            first = tl.load(
                batch.query_start_loc_ptr + entry, mask=live & (entry >= 0), other=limit
            )
            count_repeated(live, index, token, position, first, batch, group, tables)
    slots = map_tile(live, index, token, position, replayed, group, tables, packet, output, choices)
    tl.store(output.slots_ptr + token, slots, mask=token < output.capacity)


@triton.jit
def map_or_pad(
    x, output, batch, packet, tables, g, choices, TILE: tl.constexpr, PAD_TILE: tl.constexpr
):
    """Program x of a group's token tiles and padding.

    Its own tile comes first and by itself: a loop over tiles would hold its loads back until the
    number of tokens has arrived. More tiles follow only when more tokens come than were planned.
    """
    num_tiles = output.num_tiles
    limit = tl.minimum(output.capacity, batch.num_positions)
    if x < num_tiles:
        map_token_tile(x, limit, output, batch, packet, tables, g, choices, TILE)
        given = given_tokens(batch, choices.FLAT)
        num_tokens = tl.minimum(given, limit)
        for tile in range(x + num_tiles, tl.cdiv(num_tokens, TILE), num_tiles):
            map_token_tile(tile, limit, output, batch, packet, tables, g, choices, TILE)
        if x == 0:
            count_cut_tokens(tables.faults_ptr, g, tables.num_groups, given, num_tokens)
            count_narrow_view(tables, g, given, batch)
    else:
        given = given_tokens(batch, choices.FLAT)
        # A negative number of tokens leaves all of num_tiles' tiles to them.
        begin = tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) * TILE
        pad_tail(output.slots_ptr, begin, output.capacity, x - num_tiles, output.num_pad, PAD_TILE)


@triton.jit
def map_request_or_pad(
    x, output, batch, packet, tables, g, choices, TILE: tl.constexpr, PAD_TILE: tl.constexpr
):
    """Program x of the base case: every num_tiles-th tile of a request, then padding."""
    given = tl.load(batch.query_start_loc_ptr + batch.num_reqs)
    num_tokens = tl.maximum(tl.minimum(given, tl.minimum(output.capacity, batch.num_positions)), 0)
    first_pad = batch.num_reqs * output.num_tiles
    if x >= first_pad:
        if x == first_pad:
            count_cut_tokens(tables.faults_ptr, g, tables.num_groups, given, num_tokens)
            count_narrow_view(tables, g, given, batch)
        # Tokens before the first request's are nobody's.
        before = tl.minimum(tl.maximum(tl.load(batch.query_start_loc_ptr), 0), num_tokens)
        pad_tail(output.slots_ptr, 0, before, x - first_pad, output.num_pad, PAD_TILE)
        pad_tail(
            output.slots_ptr, num_tokens, output.capacity, x - first_pad, output.num_pad, PAD_TILE
        )
    else:
        entry = x // output.num_tiles
        begin = tl.load(batch.query_start_loc_ptr + entry)
        # Whatever the offsets are, tokens stay within the output and the positions.
        begin = tl.minimum(tl.maximum(begin, 0), num_tokens)
        end = tl.minimum(tl.load(batch.query_start_loc_ptr + entry + 1), num_tokens)
        row = tl.load(batch.idx_mapping_ptr + entry)
        group = load_group(tables, g)
        first = begin + (x - entry * output.num_tiles) * TILE
        for tile_begin in range(first, end, output.num_tiles * TILE):
            token = tile_begin + tl.arange(0, TILE)
            live = token < end
            position = tl.load(batch.positions_ptr + token, mask=live, other=-1)
            index = row + tl.zeros([TILE], tl.int32)
            replayed = live
            if choices.REPLAY:
                replayed = replayed_tokens(position, entry, entry >= 0, batch)
            if choices.CHECKED:
                count_repeated(
                    live, index, token, position, begin + token * 0, batch, group, tables
                )
            slots = map_tile(
                live, index, token, position, replayed, group, tables, packet, output, choices
            )
            tl.store(output.slots_ptr + token, slots, mask=live)


@triton.jit
def given_tokens(batch, FLAT: tl.constexpr):
    """How many tokens the batch names."""
    if FLAT:
        return batch.num_positions
    else:
        return tl.load(batch.query_start_loc_ptr + batch.num_reqs)


@triton.jit
def count_narrow_view(tables, g, given, batch):
    """Count a view of the slots that holds fewer tokens than the batch names, once a call."""
    if given > batch.num_expected:
        one = (given * 0 + 1).to(tl.int64)
        tl.atomic_add(tables.faults_ptr + TOKENS_OVER_VIEW * tables.num_groups + g, one)


@triton.jit
def count_repeated(live, index, token, position, first, batch, group, tables):
    """Count tokens whose position an earlier token of their entry has, one of its `first` on.

    Checked mode only: every earlier token is looked at.
    """
    row = clamp_row(index, tables.max_num_reqs)
    live = live & (row >= 0) & (row < tables.max_num_reqs) & (position >= 0)
    live = live & (group.kind != KIND_STATE)
    first = tl.maximum(first, 0)
    repeated = token * 0
    end = tl.max(tl.where(live, token, -1), axis=0)
    for earlier in range(tl.min(tl.where(live, first, token), axis=0), end):
        same = position == tl.load(batch.positions_ptr + earlier)
        repeated = tl.where(same & (earlier >= first) & (earlier < token), 1, repeated)
    repeats = live & (repeated != 0)
    count_faults(tables, repeats, DUPLICATE_POSITION, group.number, index, token, position, True)
