"""The whole step in one launch, in the forms that lower well on Ascend.

The grid has one axis, program p working for group p mod G. Programs of a group have one of four
roles: gather, tokens, padding, writers. Where programs outnumber cores, the first core gets another
one; a mixed batch's first tokens, its many decodes, cost most, so they do not come first. There is
no barrier and none is needed: writers touch the columns of a row from `starts` on and the lengths
on the device; readers take columns before `starts` from the table, the others from the staged ids,
and lengths from the packet. Nothing in this launch is read from where another of its programs
writes.

The gather's state is per (group, batch entry), four int32: the row and its generation that the
entry was copied from, how many columns it has filled and how many are nulled. One program owns a
batch entry. It compares ENTRIES of them at a time; each that changed is then copied in contiguous
pieces, whose store has an upper bound only: anything else would be read, changed and written back
as a whole.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import (
    clamp_rows,
    load_divisor,
    load_row,
    quotient,
    scalar_quotient,
)
from fused_slots.kernels.ascend.layout import (
    COLUMNS,
    ENTRIES,
    FAULTS,
    LINE_WIDTH,
    PAD_TILE,
    RING,
    ROWS,
    RUNS,
    SPAN_TILES,
    STAGED,
    WHOLE,
)
from fused_slots.kernels.ascend.table import of_rows
from fused_slots.kernels.ascend.tokens import count_narrow_view, map_span, pad_head
from fused_slots.kernels.common import changed_columns, count_cut_tokens, pad_tail
from fused_slots.kernels.layout import (
    COLUMN_SIZE,
    KIND,
    KIND_RING,
    KIND_STATE,
    OFFSET,
    OFFSET_UNIT,
    REACH,
    ROW_OUT_OF_RANGE,
    WIDTH,
)


@triton.jit
def copy_columns(target_ptr, source_ptr, begin, end):
    """target[begin:end] = source[begin:end]"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(source_ptr + column, mask=column < end, other=0)
        tl.store(target_ptr + column, values, mask=column < end)


@triton.jit
def zero_columns(target_ptr, begin, end):
    """target[begin:end] = 0"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tl.store(target_ptr + column, tl.zeros([COLUMNS], tl.int32), mask=column < end)


@triton.jit
def number_of(chosen, numbers):
    """The number (>= 0) of the one chosen lane, as a scalar."""
    return tl.sum(tl.where(chosen, numbers, 0), axis=0)


@triton.jit
def gather_entry(
    entry,
    begin,
    end,
    gathered_ptr,
    gathered_stride,
    idx_mapping_ptr,
    num_computed_ptr,
    lengths_ptr,
    plane,
    table_ptr,
    width,
    reach,
    column_divisor,
    line_ptr,
    num_reqs,
    max_num_reqs,
    FLAGS: tl.constexpr,
):
    """Make columns [begin, end) of one batch entry what they must be.

    Its numbers are read anew: picked from vectors, each would need a reduction and an event.
    """
    index = load_row(idx_mapping_ptr, tl.minimum(entry, tl.maximum(num_reqs - 1, 0)), max_num_reqs)
    exists = (entry < num_reqs) & (index >= 0) & (index < max_num_reqs)
    row = tl.where(exists, index, 0)
    length = tl.where(exists, tl.load(lengths_ptr + row), 0)
    start = tl.minimum(tl.load(lengths_ptr - plane + row), length)
    base = tl.load(lengths_ptr + plane + row)
    below = tl.maximum(tl.maximum(tl.load(num_computed_ptr + row), 0) - reach, 0)
    nulls = tl.minimum(scalar_quotient(below, column_divisor, FLAGS), length)
    nulls = tl.where(reach == 0, 0, nulls)
    target_ptr = gathered_ptr + entry * gathered_stride
    source_ptr = table_ptr + row.to(tl.int64) * width
    lowest = tl.maximum(begin, nulls)
    zero_columns(target_ptr, begin, tl.minimum(nulls, end))
    copy_columns(target_ptr, source_ptr, lowest, tl.minimum(start, end))
    copy_columns(
        target_ptr,
        lengths_ptr + base.to(tl.int64),
        tl.maximum(lowest, start),
        tl.minimum(length, end),
    )
    zero_columns(target_ptr, tl.maximum(begin, length), end)
    # Elsewhere gather_entries counts such rows; a choice stands in an `if` of its own.
    if WHOLE & FLAGS:  # noqa: SIM102
        if (entry < num_reqs) & (index >= max_num_reqs):
            tl.atomic_add(line_ptr + FAULTS + ROW_OUT_OF_RANGE, 1)


@triton.jit
def gather_entries(
    first_entry,
    gathered_ptr,
    gathered_stride,
    idx_mapping_ptr,
    num_computed_ptr,
    lengths_ptr,
    plane,
    generations_ptr,
    table_ptr,
    width,
    reach,
    column_divisor,
    state_ptr,
    line_ptr,
    num_reqs,
    num_entries,
    max_num_reqs,
    FLAGS: tl.constexpr,
):
    """Bring ENTRIES batch entries up to date: copy what changed since each was gathered last."""
    lane = tl.arange(0, ENTRIES)
    entry = first_entry + lane
    live = entry < num_entries
    index = tl.load(idx_mapping_ptr + entry, mask=entry < num_reqs, other=-1)
    row = clamp_rows(index, max_num_reqs)
    exists = (row >= 0) & (row < max_num_reqs)
    safe_row = tl.where(exists, row, 0)
    filled, computed, generation = lane * 0, lane * 0, lane * 0
    for first in range(0, max_num_reqs, ROWS):
        filled = of_rows(filled, safe_row, first, lengths_ptr, max_num_reqs)
        computed = of_rows(computed, safe_row, first, num_computed_ptr, max_num_reqs)
        generation = of_rows(generation, safe_row, first, generations_ptr, max_num_reqs)
    filled = tl.where(exists, filled, 0)
    below = tl.maximum(tl.maximum(computed, 0) - reach, 0)
    nulled = quotient(below, column_divisor, FLAGS)
    nulled = tl.minimum(nulled, filled)
    if reach == 0:
        nulled = lane * 0
    key = tl.where(exists, row, -1)
    generation = tl.where(exists, generation, 0)
    key_ptr = state_ptr + entry
    generation_ptr = key_ptr + max_num_reqs
    filled_ptr = generation_ptr + max_num_reqs
    nulled_ptr = filled_ptr + max_num_reqs
    old_key = tl.load(key_ptr, mask=live, other=-1)
    old_generation = tl.load(generation_ptr, mask=live, other=0)
    old_filled = tl.load(filled_ptr, mask=live, other=0)
    old_nulled = tl.load(nulled_ptr, mask=live, other=0)
    kept = (key == old_key) & (generation == old_generation)
    low, high = changed_columns(kept, filled, nulled, old_filled, old_nulled, width)
    changed = live & (low < high)
    strange = live & (row >= max_num_reqs)
    # One reduction for two counts.
    counts = tl.sum(changed.to(tl.int32) + (strange.to(tl.int32) << 16), axis=0)
    if counts >> 16 > 0:
        tl.atomic_add(line_ptr + FAULTS + ROW_OUT_OF_RANGE, counts >> 16)
    previous = -1
    for _ in range(counts & 0xFFFF):
        previous = tl.min(tl.where(changed & (lane > previous), lane, ENTRIES), axis=0)
        gather_entry(
            first_entry + previous,
            number_of(lane == previous, low),
            number_of(lane == previous, high),
            gathered_ptr,
            gathered_stride,
            idx_mapping_ptr,
            num_computed_ptr,
            lengths_ptr,
            plane,
            table_ptr,
            width,
            reach,
            column_divisor,
            line_ptr,
            num_reqs,
            max_num_reqs,
            FLAGS,
        )
    tl.store(key_ptr, key, mask=live)
    tl.store(generation_ptr, generation, mask=live)
    tl.store(filled_ptr, filled, mask=live)
    tl.store(nulled_ptr, nulled, mask=live)


@triton.jit
def write_rows(
    program,
    num_write,
    written_rows_ptr,
    num_written_rows,
    lengths_ptr,
    plane,
    generations_ptr,
    table_ptr,
    width,
    num_columns_ptr,
    device_generations_ptr,
    g,
    max_num_reqs,
):
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
    search_steps: "i32",
    lines_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    device_generations_ptr: "*i32",
    state_ptr: "*i32",
    num_groups: "i32",
    max_num_reqs: "i32",
    TILE: tl.constexpr,
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
        search_steps: halvings of [0, num_reqs) that leave one entry.
        lines_ptr: [G, LINE_WIDTH], numbers and fault counters of each group (layout.py).
        arena_ptr: all groups' tables, ids in [max_num_reqs, width] at the group's OFFSET.
        num_columns_ptr: [G, max_num_reqs], filled columns of each row, written where rows are.
        device_generations_ptr: [max_num_reqs], likewise.
        state_ptr: [G, 4, max_num_reqs], what each batch entry holds.
        num_groups: G.
        max_num_reqs: rows of each table.
        TILE: tokens that a program takes at a time where requests or positions are mixed.
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
                    entry,
                    0,
                    gathered_width,
                    gathered_ptr,
                    gathered_stride,
                    idx_mapping_ptr,
                    num_computed_ptr,
                    lengths_ptr,
                    plane,
                    table_ptr,
                    width,
                    reach,
                    column_divisor,
                    line_ptr,
                    num_reqs,
                    max_num_reqs,
                    FLAGS,
                )
        else:
            for first in range(x * ENTRIES, num_entries, num_gather * ENTRIES):
                gather_entries(
                    first,
                    gathered_ptr + table_offset,
                    width.to(tl.int64),
                    idx_mapping_ptr,
                    num_computed_ptr,
                    lengths_ptr,
                    plane,
                    generations_ptr,
                    table_ptr,
                    width,
                    reach,
                    column_divisor,
                    state_ptr + 4 * g * max_num_reqs,
                    line_ptr,
                    num_reqs,
                    num_entries,
                    max_num_reqs,
                    FLAGS,
                )
    elif x < num_gather + num_tiles + num_pad:
        x -= num_gather
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
            if RING & FLAGS:
                width = tl.where(kind == KIND_RING, 0, width)
            column_divisor = load_divisor(line_ptr, COLUMN_SIZE, FLAGS)
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
                    plane,
                    max_num_reqs,
                    TILE,
                    STAGED | FLAGS,
                )
        # Without programs of its own the tail is padded by those that map tokens.
        first_pad = tl.where(num_pad == 0, 0, num_tiles)
        if x >= first_pad:
            if x == first_pad:
                count_cut_tokens(line_ptr + FAULTS, 0, 1, given, num_tokens)
                count_narrow_view(line_ptr, num_tokens, num_tokens_padded)
            pad_begin = tl.where(slotless, 0, tl.maximum(num_tokens, 0))
            pad_head(slots_ptr, tl.where(slotless, 0, begin), num_tokens, x - first_pad)
            pad_tail(
                slots_ptr, pad_begin, capacity, x - first_pad, num_programs - first_pad, PAD_TILE
            )
    else:
        write_rows(
            x - num_gather - num_tiles - num_pad,
            num_write,
            written_rows_ptr,
            num_written_rows,
            lengths_ptr,
            plane,
            generations_ptr,
            table_ptr,
            width,
            num_columns_ptr + g * max_num_reqs,
            device_generations_ptr,
            g,
            max_num_reqs,
        )
