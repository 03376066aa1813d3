"""Slots of every token of a batch in every KV cache group, in one launch (formula: formula.py).

Tokens are dealt to programs in two ways (tokens.py), with the same result: by token, a tile of
consecutive tokens each; or by request, the base case, over the grid (group_count, num_reqs·tiles +
1). Further programs of the grid write PAD behind the last token. An entry's signature declares its
arguments, and the backend takes their types from there (fused_slots/backends/entries.py).
"""

import triton
import triton.language as tl

from fused_slots.kernels.gpu.structs import Batch, Choices, Output, Packet, Tables
from fused_slots.kernels.gpu.tokens import map_or_pad, map_request_or_pad


@triton.jit
def slots_kernel(
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
    replay_window: "i64",
    num_tiles: "i32",
    num_pad: "i32",
    query_len_inverse: "i32",
    search_steps: "i32",
    descriptor_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    faults_ptr: "*i64",
    details_ptr: "*i64",
    num_groups: "i32",
    max_num_reqs: "i32",
    interleave: "i32",
    interleave_shift: "i32",
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    FLAT: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    NULLS: tl.constexpr,
    REPLAY: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Map a batch: grid (num_groups, num_tiles + num_pad), BY_REQUEST num_reqs·num_tiles + num_pad.

    Args:
        slots_ptr: int32 or int64 [G, slots_stride], written up to the capacity.
        idx_mapping_ptr: int32 or int64 [num_reqs], each entry's row; FLAT: [num_positions], each
            token's.
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
        num_tiles: int32, programs of a group that map tokens; BY_REQUEST: tokens of one entry.
        num_pad: int32, programs of a group that write PAD behind the last tile.
        query_len_inverse: int32, 2^31 / tokens of each entry where the sizes suggest that all have
            as many (its bits as uint32); 0 = no guess. Not read if BY_REQUEST.
        search_steps: int32, steps of the search for a token's entry, each to an eighth; likewise.
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
        TILE: tokens that a program maps at a time.
        PAD_TILE: slots that a program pads at a time.
        FLAT: the tokens are (row, position) pairs, without entries.
        BY_REQUEST: tiles are dealt to requests.
        POW2: every number that positions are divided by is a power of two.
        SHARDED: there is more than one context parallel rank.
        RING: there is a group of rings.
        NULLS: the manager has a null block, which is never written.
        REPLAY: replayed tokens of cacheable groups are PAD.
        CHECKED: the first faults are recorded one by one.
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
    packet = Packet(descriptor_ptr, 0)
    # Built where they are passed: an assignment makes values of constants.
    if BY_REQUEST:
        map_request_or_pad(
            tl.program_id(1),
            output,
            batch,
            packet,
            tables,
            g,
            Choices(False, POW2, SHARDED, RING, REPLAY, False, NULLS, CHECKED),
            TILE,
            PAD_TILE,
        )
    else:
        map_or_pad(
            tl.program_id(1),
            output,
            batch,
            packet,
            tables,
            g,
            Choices(FLAT, POW2, SHARDED, RING, REPLAY, False, NULLS, CHECKED),
            TILE,
            PAD_TILE,
        )
