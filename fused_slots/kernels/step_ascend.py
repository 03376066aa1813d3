"""The whole step in one launch, in the forms that lower well on Ascend.

The grid has one axis, program p working for group p mod G. Programs of a group have one of four
roles, as in step.py, in another order: gather, tokens, padding, writers. Where programs outnumber
cores, the first core gets another one; a mixed batch's first tokens, its many decodes, cost most.
There is no barrier and none is needed: writers touch the columns of a row from `starts` on and the
lengths on the device; readers take columns before `starts` from the table, the others from the
staged ids, and lengths from the packet. Nothing in this launch is read from where another of its
programs writes.

The gather's state is per (group, batch slot), four planes of int32: the row and its generation
that the slot was copied from, how many columns it has filled and how many are nulled. One program
owns a batch slot. It compares SLOTS of them at a time; each that changed is then copied in
contiguous runs, whose store has an upper bound only: anything else would be read, changed and
written back as a whole.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import changed_columns, count_cut_tokens, pad_tail
from fused_slots.kernels.entries_ascend import ROWS, of_rows
from fused_slots.kernels.layout import (
    COLUMN_SHIFT,
    COLUMN_SIZE,
    DESCRIPTOR_WIDTH,
    OFFSET,
    OFFSET_UNIT,
    REACH,
    ROW_OUT_OF_RANGE,
    WIDTH,
)
from fused_slots.kernels.mapping_ascend import clamp_rows, count_faults, quotient
from fused_slots.kernels.slot_mapping_ascend import map_spans


@triton.jit
def copy_run(target_ptr, source_ptr, begin, end, COLUMNS: tl.constexpr):
    """target[begin:end] = source[begin:end]"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(source_ptr + column, mask=column < end, other=0)
        tl.store(target_ptr + column, values, mask=column < end)


@triton.jit
def zero_run(target_ptr, begin, end, COLUMNS: tl.constexpr):
    """target[begin:end] = 0"""
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tl.store(target_ptr + column, tl.zeros([COLUMNS], tl.int32), mask=column < end)


@triton.jit
def number_of(mine, numbers):
    """The number (>= 0) of the one lane that is `mine`, as a scalar."""
    return tl.sum(tl.where(mine, numbers, 0), axis=0)


@triton.jit
def gather_tile(
    first_slot,
    gathered_ptr,
    gathered_stride,
    gathered_width,
    idx_mapping_ptr,
    num_computed_ptr,
    filled_ptr,
    starts_ptr,
    bases_ptr,
    generations_ptr,
    ids_ptr,
    table_ptr,
    width,
    state_ptr,
    plane,
    group,
    g,
    num_groups,
    num_reqs,
    num_slots,
    max_num_reqs,
    faults_ptr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Bring SLOTS batch slots up to date: copy what changed since each was gathered last."""
    lane = tl.arange(0, SLOTS)
    slot = first_slot + lane
    live = slot < num_slots
    index = tl.load(idx_mapping_ptr + slot, mask=slot < num_reqs, other=-1)
    row = clamp_rows(index, max_num_reqs)
    count_faults(faults_ptr, live & (row >= max_num_reqs), ROW_OUT_OF_RANGE, g, num_groups)
    exists = (row >= 0) & (row < max_num_reqs)
    safe_row = tl.where(exists, row, 0)
    filled, computed, generation = lane * 0, lane * 0, lane * 0
    for first in range(0, max_num_reqs, ROWS):
        filled = of_rows(filled, safe_row, first, filled_ptr, max_num_reqs)
        computed = of_rows(computed, safe_row, first, num_computed_ptr, max_num_reqs)
        if not WHOLE:
            generation = of_rows(generation, safe_row, first, generations_ptr, max_num_reqs)
    filled = tl.where(exists, filled, 0)
    reach = tl.load(group + REACH)
    below = tl.maximum(tl.maximum(computed, 0) - reach, 0)
    nulled = quotient(below, tl.load(group + COLUMN_SIZE), tl.load(group + COLUMN_SHIFT), POW2)
    nulled = tl.minimum(nulled, filled)
    if reach == 0:
        nulled = lane * 0
    if WHOLE:
        low = lane * 0
        high = low + gathered_width
    else:
        key = tl.where(exists, row, -1)
        generation = tl.where(exists, generation, 0)
        old_state_ptr = state_ptr + slot
        old_key = tl.load(old_state_ptr, mask=live, other=-1)
        old_generation = tl.load(old_state_ptr + plane, mask=live, other=0)
        old_filled = tl.load(old_state_ptr + 2 * plane, mask=live, other=0)
        old_nulled = tl.load(old_state_ptr + 3 * plane, mask=live, other=0)
        kept = (key == old_key) & (generation == old_generation)
        low, high = changed_columns(kept, filled, nulled, old_filled, old_nulled, width)
    changed = live & (low < high)
    previous = -1
    for _ in range(tl.sum(changed.to(tl.int32), axis=0)):
        previous = tl.min(tl.where(changed & (lane > previous), lane, SLOTS), axis=0)
        mine = lane == previous
        begin, end = number_of(mine, low), number_of(mine, high)
        of_row, length = number_of(mine, safe_row), number_of(mine, filled)
        nulls = number_of(mine, nulled)
        start = tl.minimum(tl.load(starts_ptr + of_row), length)
        target_ptr = gathered_ptr + (first_slot + previous).to(tl.int64) * gathered_stride
        source_ptr = table_ptr + of_row.to(tl.int64) * width
        staged_ptr = ids_ptr + tl.load(bases_ptr + of_row).to(tl.int64)
        lowest = tl.maximum(begin, nulls)
        zero_run(target_ptr, begin, tl.minimum(nulls, end), COLUMNS)
        copy_run(target_ptr, source_ptr, lowest, tl.minimum(start, end), COLUMNS)
        copy_run(
            target_ptr, staged_ptr, tl.maximum(lowest, start), tl.minimum(length, end), COLUMNS
        )
        zero_run(target_ptr, tl.maximum(begin, length), end, COLUMNS)
    if not WHOLE:
        tl.store(old_state_ptr, key, mask=live)
        tl.store(old_state_ptr + plane, generation, mask=live)
        tl.store(old_state_ptr + 2 * plane, filled, mask=live)
        tl.store(old_state_ptr + 3 * plane, nulled, mask=live)


@triton.jit
def write_rows(
    program,
    num_write,
    num_written_rows,
    written_rows_ptr,
    filled_ptr,
    starts_ptr,
    bases_ptr,
    generations_ptr,
    ids_ptr,
    table_ptr,
    width,
    num_columns_ptr,
    device_generations_ptr,
    g,
    max_num_reqs,
    COLUMNS: tl.constexpr,
):
    """Write every num_write-th staged row of one group; program 0 also all rows' lengths."""
    for record in range(program, num_written_rows, num_write):
        row = tl.load(written_rows_ptr + record)
        copy_run(
            table_ptr + row.to(tl.int64) * width,
            ids_ptr + tl.load(bases_ptr + row).to(tl.int64),
            tl.load(starts_ptr + row),
            tl.load(filled_ptr + row),
            COLUMNS,
        )
    if program == 0:
        copy_run(num_columns_ptr, filled_ptr, 0, max_num_reqs, COLUMNS)
        if g == 0:
            copy_run(device_generations_ptr, generations_ptr, 0, max_num_reqs, COLUMNS)


@triton.jit
def step_on_ascend(
    slots_ptr,  # int32 or int64 [G, slots_stride]
    gathered_ptr,  # int32, all groups' gathered tables; WHOLE: the lowest of the caller's tables
    gathered_lines_ptr,  # int64 [G, 3], offset from gathered_ptr, stride, width; read if WHOLE
    idx_mapping_ptr,  # int32 or int64 [num_reqs]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    positions_ptr,  # int64 [num_positions]
    words_ptr,  # int32 [2 * num_positions], the same memory
    replay_start_ptr,  # int32 [num_reqs]; read if REPLAY
    num_computed_ptr,  # int32 [max_num_reqs]; -1 nulls nothing
    filled_ptr,  # int32 [G, max_num_reqs], filled columns of each row after this launch
    starts_ptr,  # int32 [G, max_num_reqs], the first that it writes; filled where it writes none
    bases_ptr,  # int32 [G, max_num_reqs], column c of a written row is ids[bases + c]
    generations_ptr,  # int32 [max_num_reqs], how often each row was started anew
    written_rows_ptr,  # int32 [num_written_rows]
    ids_ptr,  # int32, staged kernel block ids
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_slots,
    num_written_rows,
    num_tiles,
    num_pad,
    num_gather,
    num_write,
    search_steps,
    descriptor_ptr,  # int32 [G, DESCRIPTOR_WIDTH]
    arena_ptr,  # int32, all groups' tables
    num_columns_ptr,  # int32 [G, max_num_reqs], written where rows are
    device_generations_ptr,  # int32 [max_num_reqs], likewise
    state_ptr,  # int32 [4, G, max_num_reqs], what each batch slot holds
    faults_ptr,  # int32 [codes + 1, G]
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    WHOLE: tl.constexpr,
):
    program = tl.program_id(0)
    x = program // num_groups
    g = program % num_groups
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    table_offset = tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    table_ptr = arena_ptr + table_offset
    width = tl.load(group + WIDTH)
    of_group = g * max_num_reqs
    if x < num_gather:
        if WHOLE:
            line_ptr = gathered_lines_ptr + 3 * g
            gathered_ptr += tl.load(line_ptr)
            gathered_stride = tl.load(line_ptr + 1)
            gathered_width = tl.load(line_ptr + 2).to(tl.int32)
        else:
            gathered_ptr += table_offset
            gathered_stride = width.to(tl.int64)
            gathered_width = width
        for first in range(x * SLOTS, num_slots, num_gather * SLOTS):
            gather_tile(
                first,
                gathered_ptr,
                gathered_stride,
                gathered_width,
                idx_mapping_ptr,
                num_computed_ptr,
                filled_ptr + of_group,
                starts_ptr + of_group,
                bases_ptr + of_group,
                generations_ptr,
                ids_ptr,
                table_ptr,
                width,
                state_ptr + of_group,
                num_groups * max_num_reqs,
                group,
                g,
                num_groups,
                num_reqs,
                num_slots,
                max_num_reqs,
                faults_ptr,
                SLOTS,
                COLUMNS,
                POW2,
                WHOLE,
            )
    elif x < num_gather + num_tiles + num_pad:
        x -= num_gather
        given = tl.load(query_start_loc_ptr + num_reqs)
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
                filled_ptr,
                starts_ptr,
                bases_ptr,
                ids_ptr,
                faults_ptr,
                max_num_reqs,
                interleave,
                interleave_shift,
                replay_window,
                SPAN,
                TILE,
                False,
                POW2,
                SHARDED,
                RING,
                REPLAY,
                True,
            )
    else:
        write_rows(
            x - num_gather - num_tiles - num_pad,
            num_write,
            num_written_rows,
            written_rows_ptr,
            filled_ptr + of_group,
            starts_ptr + of_group,
            bases_ptr + of_group,
            generations_ptr,
            ids_ptr,
            table_ptr,
            width,
            num_columns_ptr + of_group,
            device_generations_ptr,
            g,
            max_num_reqs,
            COLUMNS,
        )
