"""From tokens to their requests, and a span of tokens to slots, run or not (see formula.py)."""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import clamp_rows, load_row, slots_of_tile
from fused_slots.kernels.ascend.layout import FAULTS, FLAT, PAD_TILE, REPLAY, RUNS, SPAN_TILES
from fused_slots.kernels.ascend.run import map_run
from fused_slots.kernels.ascend.table import gather_in_tile
from fused_slots.kernels.layout import PAD, TOKENS_OVER_VIEW


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
    replay_len_ptr,
    replay_window,
    num_reqs,
    search_steps,
    max_num_reqs,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Row, replay start and length of each token of a tile.

    Where all queries are equally long, a tile's entries are consecutive and come in one transfer.
    Elsewhere the requests that begin in the tile are laid over one another.
    """
    lane = tl.arange(0, TILE)
    token = first + lane
    length = tl.maximum(num_tokens // tl.maximum(num_reqs, 1), 1)
    base = tl.minimum(first // length, tl.maximum(num_reqs - 1, 0))
    entry = tl.minimum((first - base * length + lane) // length, TILE - 1)
    exists = lane < num_reqs - base
    begin = tl.load(query_start_loc_ptr + base + lane, mask=exists, other=0)
    end = tl.load(query_start_loc_ptr + base + 1 + lane, mask=exists, other=0)
    inside = (gather_in_tile(begin, entry) <= token) & (token < gather_in_tile(end, entry))
    misses = tl.sum(((token < num_tokens) & (inside == 0)).to(tl.int32), axis=0)
    start, replayed = lane * 0, lane * 0
    if misses == 0:
        row = tl.load(idx_mapping_ptr + base + lane, mask=exists, other=-1)
        row = gather_in_tile(clamp_rows(row, max_num_reqs), entry)
        if REPLAY & FLAGS:
            start = tl.load(replay_start_ptr + base + lane, mask=exists, other=0)
            start = gather_in_tile(start, entry)
            if replay_window < 0:
                replayed = tl.load(replay_len_ptr + base + lane, mask=exists, other=0)
                replayed = gather_in_tile(replayed, entry)
    else:
        final = tl.minimum(first + TILE, num_tokens) - 1
        b = last_at_most(query_start_loc_ptr, num_reqs, first, search_steps)
        last = last_at_most(query_start_loc_ptr, num_reqs, final, search_steps)
        row = lane * 0 + load_row(idx_mapping_ptr, b, max_num_reqs)
        if REPLAY & FLAGS:
            start = lane * 0 + tl.load(replay_start_ptr + b)
            if replay_window < 0:
                replayed = lane * 0 + tl.load(replay_len_ptr + b)
        for following in range(b + 1, last + 1):
            behind = token >= tl.load(query_start_loc_ptr + following)
            row = tl.where(behind, load_row(idx_mapping_ptr, following, max_num_reqs), row)
            if REPLAY & FLAGS:
                start = tl.where(behind, tl.load(replay_start_ptr + following), start)
                if replay_window < 0:
                    replayed = tl.where(behind, tl.load(replay_len_ptr + following), replayed)
    if REPLAY & FLAGS:
        if replay_window < 0:
            replayed = tl.maximum(replayed, 0)
        else:
            replayed = tl.where(start == 0, 0, replay_window)
    return row, start, replayed


@triton.jit
def map_tile(
    first,
    num_tokens,
    slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    replay_len_ptr,
    replay_window,
    num_reqs,
    search_steps,
    line_ptr,
    width,
    column_divisor,
    table_ptr,
    lengths_ptr,
    plane,
    max_num_reqs,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Map TILE tokens from `first` on, whatever their requests and positions."""
    token = first + tl.arange(0, TILE)
    live = token < num_tokens
    position = tl.load(positions_ptr + token, mask=live, other=-1)
    start, replayed = token * 0, token * 0
    if FLAT & FLAGS:
        row = tl.load(idx_mapping_ptr + token, mask=live, other=-1)
        row = clamp_rows(row, max_num_reqs)
    else:
        row, start, replayed = requests_of_tile(
            first,
            num_tokens,
            idx_mapping_ptr,
            query_start_loc_ptr,
            replay_start_ptr,
            replay_len_ptr,
            replay_window,
            num_reqs,
            search_steps,
            max_num_reqs,
            TILE,
            FLAGS,
        )
    slots = slots_of_tile(
        live,
        row,
        position,
        start,
        replayed,
        positions_ptr,
        first,
        num_tokens,
        line_ptr,
        width,
        column_divisor,
        table_ptr,
        lengths_ptr,
        plane,
        max_num_reqs,
        slots_ptr.dtype.element_ty,
        TILE,
        FLAGS,
    )
    tl.store(slots_ptr + token, slots, mask=live)


@triton.jit
def map_span(
    first,
    num_tokens,
    slots_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    replay_len_ptr,
    replay_window,
    num_reqs,
    search_steps,
    line_ptr,
    width,
    column_divisor,
    table_ptr,
    lengths_ptr,
    plane,
    max_num_reqs,
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Map the span of tokens from `first` on: whole if it is a run, else tile by tile."""
    mapped = 0
    end = first + TILE
    if RUNS & FLAGS:
        end = tl.minimum(first + SPAN_TILES * TILE, num_tokens)
        mapped = map_run(
            first,
            end - first,
            last_at_most(query_start_loc_ptr, num_reqs, first, search_steps),
            slots_ptr,
            idx_mapping_ptr,
            query_start_loc_ptr,
            positions_ptr,
            replay_start_ptr,
            replay_len_ptr,
            replay_window,
            line_ptr,
            width,
            column_divisor,
            table_ptr,
            lengths_ptr,
            plane,
            max_num_reqs,
            SPAN_TILES * TILE,
            FLAGS,
        )
    # Under an if, since the compiler moves what tiles share in front of their loop.
    if mapped == 0:
        for tile in range(first, end, TILE):
            map_tile(
                tile,
                num_tokens,
                slots_ptr,
                idx_mapping_ptr,
                query_start_loc_ptr,
                positions_ptr,
                replay_start_ptr,
                replay_len_ptr,
                replay_window,
                num_reqs,
                search_steps,
                line_ptr,
                width,
                column_divisor,
                table_ptr,
                lengths_ptr,
                plane,
                max_num_reqs,
                TILE,
                FLAGS,
            )


@triton.jit
def pad_head(slots_ptr, begin, num_tokens, program):
    """Write PAD in front of the first token, should there be room; program 0 does it."""
    if program == 0:
        for first in range(0, tl.minimum(begin, num_tokens), PAD_TILE):
            token = first + tl.arange(0, PAD_TILE)
            value = tl.full([PAD_TILE], PAD, slots_ptr.dtype.element_ty)
            tl.store(slots_ptr + token, value, mask=token < tl.minimum(begin, num_tokens))


@triton.jit
def count_narrow_view(line_ptr, num_tokens, num_tokens_padded):
    """Count a call whose view is narrower than its tokens."""
    if num_tokens > num_tokens_padded:
        tl.atomic_add(line_ptr + FAULTS + TOKENS_OVER_VIEW, 1)
