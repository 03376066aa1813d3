"""Slots of every token in every KV cache group, in one launch that graphs may capture."""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.layout import LINE_WIDTH
from fused_slots.kernels.ascend.tokens import map_and_pad


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
    lines_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    num_groups: "i32",
    max_num_reqs: "i32",
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
        lines_ptr: [G, LINE_WIDTH], numbers and fault counters of each group (layout.py).
        arena_ptr: all groups' tables, ids in [max_num_reqs, width] at the group's OFFSET.
        num_columns_ptr: [G, max_num_reqs], filled columns of each row.
        num_groups: G.
        max_num_reqs: rows of each table.
        FLAGS: see layout.py.
    """
    program = tl.program_id(0)
    x = program // num_groups
    g = program % num_groups
    line_ptr = lines_ptr + g * LINE_WIDTH
    map_and_pad(
        x, num_tiles, num_tiles + num_pad, slots_ptr + g.to(tl.int64) * slots_stride, capacity,
        idx_mapping_ptr, query_start_loc_ptr, positions_ptr, replay_start_ptr, replay_len_ptr,
        replay_window, num_reqs, num_positions, num_tokens_padded, line_ptr, arena_ptr,
        num_columns_ptr + g * max_num_reqs, 0, max_num_reqs, FLAGS,
    )  # fmt: skip
