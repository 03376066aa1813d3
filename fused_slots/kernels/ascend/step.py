"""The whole step in one launch, in the forms that lower well on Ascend.

The grid has one axis, program p working for group p mod G. Programs of a group have one of four
roles: gather, tokens, padding, writers, in this order. There is no barrier and none is needed:
writers touch the columns of a row from `starts` on and the lengths on the device; readers take
columns before `starts` from the table, the others from the staged ids, and lengths from the packet.
Nothing in this launch is read from where another of its programs writes.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import load_divisor
from fused_slots.kernels.ascend.gather import copy_columns, gather_entries, gather_entry
from fused_slots.kernels.ascend.layout import ENTRIES, LINE_WIDTH, STAGED, WHOLE
from fused_slots.kernels.ascend.tokens import map_and_pad
from fused_slots.kernels.layout import COLUMN_SIZE, OFFSET, OFFSET_UNIT, REACH, WIDTH


@triton.jit
def write_rows(
    program, num_write, written_rows_ptr, num_written_rows, lengths_ptr, plane, generations_ptr,
    table_ptr, width, num_columns_ptr, device_generations_ptr, g, max_num_reqs,
):  # fmt: skip
    """Write every num_write-th staged row of one group; program 0 also all rows' lengths.

    A start of -c: the row is empty, and its first c columns get the staged ids, all 0, since
    kernels of states read those of a freed row.
    """
    for record in range(program, num_written_rows, num_write):
        row = tl.load(written_rows_ptr + record)
        start = tl.load(lengths_ptr - plane + row)
        copy_columns(
            table_ptr + row.to(tl.int64) * width,
            lengths_ptr + tl.load(lengths_ptr + plane + row).to(tl.int64),
            tl.maximum(start, 0),
            tl.maximum(tl.load(lengths_ptr + row), -start),
        )
    if program == 0:
        copy_columns(num_columns_ptr, lengths_ptr, 0, max_num_reqs)
        if g == 0:
            copy_columns(device_generations_ptr, generations_ptr, 0, max_num_reqs)


@triton.jit
def step_on_ascend(
    slots_ptr: "*slot",
    gathered_ptr: "*i32",
    gathered_lines_ptr: "*i64",
    idx_mapping_ptr: "*index",
    query_start_loc_ptr: "*i32",
    positions_ptr: "*i64",
    replay_start_ptr: "*i32",
    replay_len_ptr: "*i32",
    num_computed_ptr: "*i32",
    starts_ptr: "*i32",
    generations_ptr: "*i32",
    written_rows_ptr: "*i32",
    slots_stride: "i64",
    capacity: "i32",
    num_reqs: "i32",
    num_positions: "i32",
    num_tokens_padded: "i32",
    replay_window: "i32",
    num_entries: "i32",
    plane: "i32",
    num_written_rows: "i32",
    num_tiles: "i32",
    num_pad: "i32",
    num_gather: "i32",
    num_write: "i32",
    lines_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    device_generations_ptr: "*i32",
    state_ptr: "*i32",
    num_groups: "i32",
    max_num_reqs: "i32",
    FLAGS: tl.constexpr,
):
    """Write staged rows, gather the batch's, map its tokens and pad, whichever of them is wanted.

    Args:
        slots_ptr: [G, slots_stride], the slots; int32 or int64.
        gathered_ptr: all groups' gathered tables; WHOLE: the lowest of the caller's tables.
        gathered_lines_ptr: [G, 3], elements from gathered_ptr, stride and width of the caller's
            tables; read if WHOLE.
        idx_mapping_ptr: int32 or int64 [num_reqs], the row of each batch entry.
        query_start_loc_ptr: [num_reqs + 1], the first token of each entry and the number of
            tokens.
        positions_ptr: [num_positions], each token's position in its request.
        replay_start_ptr: [num_reqs], first replayed position of each entry; read if REPLAY.
        replay_len_ptr: [num_reqs], how many positions are; read if replay_window < 0.
        num_computed_ptr: [max_num_reqs], computed tokens of each row; -1 nulls nothing.
        starts_ptr: [3, G, max_num_reqs] and column ids, what the launch must know of rows
            (table.py); if plane = 0 [G, max_num_reqs], their lengths.
        generations_ptr: [max_num_reqs], how often each row was started anew.
        written_rows_ptr: [num_written_rows], the rows that this launch writes.
        slots_stride: elements from one group's slots to the next one's.
        capacity: slots of each group that are written.
        num_reqs: batch entries.
        num_positions: positions that may be read.
        num_tokens_padded: width of the view that the caller gets; more tokens are a fault.
        replay_window: how many positions are replayed in every entry whose start is not 0; -1 =
            replay_len says it.
        num_entries: batch entries to gather, those that are zeroed included.
        plane: elements from starts to lengths, and from there to bases (table.py); 0 = nothing is
            written.
        num_written_rows: rows with staged writes.
        num_tiles: programs of each group that map tokens.
        num_pad: programs of each group that write PAD behind the last token; 0 = the others do.
        num_gather: programs of each group that gather.
        num_write: programs of each group that write rows.
        lines_ptr: [G, LINE_WIDTH], numbers and fault counters of each group (layout.py).
        arena_ptr: all groups' tables, ids in [max_num_reqs, width] at the group's OFFSET.
        num_columns_ptr: [G, max_num_reqs], filled columns of each row, written where rows are.
        device_generations_ptr: [max_num_reqs], likewise.
        state_ptr: [G, 4, max_num_reqs], what each batch entry holds.
        num_groups: G.
        max_num_reqs: rows of each table.
        FLAGS: see layout.py.
    """
    program = tl.program_id(0)
    x = program // num_groups
    g = program % num_groups
    line_ptr = lines_ptr + g * LINE_WIDTH
    table_offset = tl.load(line_ptr + OFFSET).to(tl.int64) * OFFSET_UNIT
    table_ptr = arena_ptr + table_offset
    width = tl.load(line_ptr + WIDTH)
    lengths_ptr = starts_ptr + plane + g * max_num_reqs
    if x < num_gather:
        reach = tl.load(line_ptr + REACH)
        column_divisor = load_divisor(line_ptr, COLUMN_SIZE, FLAGS)
        if WHOLE & FLAGS:
            gathered_lines_ptr += 3 * g
            gathered_ptr += tl.load(gathered_lines_ptr)
            gathered_stride = tl.load(gathered_lines_ptr + 1)
            gathered_width = tl.load(gathered_lines_ptr + 2).to(tl.int32)
            for entry in range(x, num_entries, num_gather):
                gather_entry(
                    entry, 0, gathered_width, gathered_ptr, gathered_stride, idx_mapping_ptr,
                    num_computed_ptr, lengths_ptr, plane, table_ptr, width, reach, column_divisor,
                    line_ptr, num_reqs, max_num_reqs, FLAGS,
                )  # fmt: skip
        else:
            share = tl.minimum((num_entries + num_gather - 1) // num_gather, ENTRIES)
            for first in range(x * share, num_entries, num_gather * share):
                gather_entries(
                    first, tl.minimum(first + share, num_entries), gathered_ptr + table_offset,
                    width.to(tl.int64), idx_mapping_ptr, num_computed_ptr, lengths_ptr, plane,
                    generations_ptr, table_ptr, width, reach, column_divisor,
                    state_ptr + 4 * g * max_num_reqs, line_ptr, num_reqs, max_num_reqs, FLAGS,
                )  # fmt: skip
    elif x < num_gather + num_tiles + num_pad:
        map_and_pad(
            x - num_gather, num_tiles, num_tiles + num_pad,
            slots_ptr + g.to(tl.int64) * slots_stride, capacity, idx_mapping_ptr,
            query_start_loc_ptr, positions_ptr, replay_start_ptr, replay_len_ptr, replay_window,
            num_reqs, num_positions, num_tokens_padded, line_ptr, arena_ptr, lengths_ptr, plane,
            max_num_reqs, STAGED | FLAGS,
        )  # fmt: skip
    else:
        write_rows(
            x - num_gather - num_tiles - num_pad, num_write, written_rows_ptr, num_written_rows,
            lengths_ptr, plane, generations_ptr, table_ptr, width,
            num_columns_ptr + g * max_num_reqs, device_generations_ptr, g, max_num_reqs,
        )  # fmt: skip
