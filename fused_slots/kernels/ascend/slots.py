"""Slots of every token in every KV cache group, in one launch that graphs may capture."""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import load_divisor
from fused_slots.kernels.ascend.layout import (
    FAULTS,
    FLAT,
    LINE_WIDTH,
    PAD_TILE,
    RING,
    RUNS,
    SPAN_TILES,
)
from fused_slots.kernels.ascend.tokens import count_narrow_view, map_span, pad_head
from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.layout import (
    COLUMN_SIZE,
    KIND,
    KIND_RING,
    KIND_STATE,
    OFFSET,
    OFFSET_UNIT,
    WIDTH,
)


@triton.jit
def slots_on_ascend(
    slots_ptr: "*slot",
    idx_mapping_ptr: "*index",
    query_start_loc_ptr: "*i32",
    positions_ptr: "*i64",
    replay_start_ptr: "*i32",
    replay_len_ptr: "*i32",
    slots_stride: "i64",
    capacity: "i32",
    num_reqs: "i32",
    num_positions: "i32",
    num_tokens_padded: "i32",
    replay_window: "i32",
    num_tiles: "i32",
    num_pad: "i32",
    search_steps: "i32",
    lines_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    num_groups: "i32",
    max_num_reqs: "i32",
    TILE: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Map every token of a batch, or flat drafts, and pad the rest of the output.

    The grid has one axis: program p works for group p mod G. Every role strides over its work, so
    any number of programs is right.

    Args:
        slots_ptr: [G, slots_stride], the output; int32 or int64.
        idx_mapping_ptr: int32 or int64 [num_reqs], the row of each batch entry; FLAT:
            [num_positions], the row of each token.
        query_start_loc_ptr: [num_reqs + 1], the first token of each entry and the number of
            tokens; FLAT: not read.
        positions_ptr: [num_positions], each token's position in its request.
        replay_start_ptr: [num_reqs], first replayed position of each entry; read if REPLAY.
        replay_len_ptr: [num_reqs], how many positions are; read if replay_window < 0.
        slots_stride: elements from one group's slots to the next one's.
        capacity: slots of each group that are written.
        num_reqs: batch entries.
        num_positions: positions that may be read.
        num_tokens_padded: width of the view that the caller gets; more tokens are a fault.
        replay_window: how many positions are replayed in every entry whose start is not 0; -1 =
            replay_len says it.
        num_tiles: programs of each group that map tokens.
        num_pad: programs of each group that write PAD behind the last token; 0 = the others do.
        search_steps: halvings of [0, num_reqs) that leave one entry.
        lines_ptr: [G, LINE_WIDTH], numbers and fault counters of each group (layout.py).
        arena_ptr: all groups' tables, ids in [max_num_reqs, width] at the group's OFFSET.
        num_columns_ptr: [G, max_num_reqs], filled columns of each row.
        num_groups: G.
        max_num_reqs: rows of each table.
        TILE: tokens that a program takes at a time where requests or positions are mixed.
        FLAGS: see layout.py.
    """
    program = tl.program_id(0)
    x = program // num_groups
    g = program % num_groups
    line_ptr = lines_ptr + g * LINE_WIDTH
    given, begin = num_positions, 0
    if (FLAT & FLAGS) == 0:
        given = tl.load(query_start_loc_ptr + num_reqs)
        begin = tl.maximum(tl.load(query_start_loc_ptr), 0)
    num_tokens = tl.minimum(given, tl.minimum(capacity, num_positions))
    slots_ptr += g.to(tl.int64) * slots_stride
    # A group without slots has no tokens: all of its programs write PAD.
    kind = tl.load(line_ptr + KIND)
    slotless = kind == KIND_STATE
    num_programs = num_tiles + num_pad
    num_tiles = tl.where(slotless, 0, num_tiles)
    if x < num_tiles:
        width = tl.load(line_ptr + WIDTH)
        if RING & FLAGS:
            width = tl.where(kind == KIND_RING, 0, width)
        column_divisor = load_divisor(line_ptr, COLUMN_SIZE, FLAGS)
        table_ptr = arena_ptr + tl.load(line_ptr + OFFSET).to(tl.int64) * OFFSET_UNIT
        lengths_ptr = num_columns_ptr + g * max_num_reqs
        SPAN: tl.constexpr = TILE * SPAN_TILES if RUNS & FLAGS else TILE
        for first in range(begin + x * SPAN, num_tokens, num_tiles * SPAN):
            map_span(
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
                0,
                max_num_reqs,
                TILE,
                FLAGS,
            )
    # Without programs of its own the tail is padded by those that map tokens.
    first_pad = tl.where(num_pad == 0, 0, num_tiles)
    if x >= first_pad:
        if x == first_pad:
            count_cut_tokens(line_ptr + FAULTS, 0, 1, given, num_tokens)
            count_narrow_view(line_ptr, num_tokens, num_tokens_padded)
        pad_begin = tl.where(slotless, 0, tl.maximum(num_tokens, 0))
        pad_head(slots_ptr, tl.where(slotless, 0, begin), num_tokens, x - first_pad)
        pad_tail(slots_ptr, pad_begin, capacity, x - first_pad, num_programs - first_pad, PAD_TILE)
