"""The whole step in one launch: staged writes, gathered tables, slot mappings and padding.

Programs of one KV cache group, by program_id(1), in four roles:

1. gather: SLOTS batch slots times one chunk of CHUNK columns each; copies what changed since the
   same slot was gathered last;
2. tokens: a tile of tokens each, as in slot_mapping.py;
3. padding: PAD behind the last token tile;
4. writers: RECORDS staged records times one chunk of columns each.

There is no barrier, and none is needed: a record names the columns of a row from `start` on. The
writers touch those and nothing else; readers (roles 1 and 2) take columns before `start` from the
table and the others, like row lengths and generations of written rows, from the packet.

The gather's state is per (group, chunk, batch slot), read and written by the one program that owns
it: the row and its generation that the chunk was copied from, how many of its columns are filled,
and how many are nulled. A row's generation grows when it is started anew.
"""

import triton
import triton.language as tl

from fused_slots.kernels.descriptor import (
    COLUMN_SHIFT,
    COLUMN_SIZE,
    DESCRIPTOR_WIDTH,
    OFFSET,
    OFFSET_UNIT,
    REACH,
    STATE_OFFSET,
    WIDTH,
)
from fused_slots.kernels.mapping import (
    ROW_OUT_OF_RANGE,
    clamp_row,
    count_faults,
    quotient,
)
from fused_slots.kernels.slot_mapping import map_or_pad, staged_record


@triton.jit
def changed_columns(old, new, CHUNK: tl.constexpr):
    """The range between two extents; empty as (CHUNK, 0) where they are equal."""
    low = tl.where(old == new, CHUNK, tl.minimum(old, new))
    high = tl.where(old == new, 0, tl.maximum(old, new))
    return low, high


@triton.jit
def gather_chunk(
    gathered_ptr,
    idx_mapping_ptr,
    num_computed_ptr,
    descriptor_ptr,
    arena_ptr,
    num_columns_ptr,
    generations_ptr,
    state_rows_ptr,
    state_extents_ptr,
    packet_ptr,
    faults_ptr,
    details_ptr,
    g,
    program,
    num_reqs,
    num_slots,
    num_groups,
    max_num_reqs,
    max_chunks,
    null_columns,
    num_written_rows,
    gathered_stride,
    gathered_width,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    POW2: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Bring one chunk of columns of SLOTS batch slots up to date."""
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    width = tl.load(group + WIDTH)
    slot = (program // max_chunks) * SLOTS + tl.arange(0, SLOTS)
    chunk = program % max_chunks
    chunk_begin = chunk * CHUNK
    live = (slot < num_slots) & (chunk_begin < gathered_width)
    index = tl.load(idx_mapping_ptr + slot, mask=live & (slot < num_reqs), other=-1)
    row = clamp_row(index, max_num_reqs)
    exists = live & (row >= 0) & (row < max_num_reqs)
    too_large = live & (row >= max_num_reqs) & (chunk == 0)
    count_faults(
        faults_ptr,
        details_ptr,
        too_large,
        ROW_OUT_OF_RANGE,
        g,
        num_groups,
        index,
        slot * 0 - 1,
        slot * 0 - 1,
        CHECKED,
    )
    safe_row = tl.where(exists, row, 0)
    filled = tl.load(num_columns_ptr + g * max_num_reqs + safe_row, mask=exists, other=0)
    written, start, filled, ids = staged_record(
        packet_ptr, num_written_rows, safe_row, exists, filled, g, num_groups, max_num_reqs
    )
    computed = tl.load(num_computed_ptr + safe_row, mask=exists & (null_columns != 0), other=0)
    reach = tl.load(group + REACH)
    below = tl.where(reach > 0, tl.maximum(computed - reach, 0), 0)
    nulled = quotient(below, tl.load(group + COLUMN_SIZE), tl.load(group + COLUMN_SHIFT), POW2)
    nulled = tl.minimum(nulled, filled)
    extent = tl.minimum(tl.maximum(filled - chunk_begin, 0), CHUNK)
    null_extent = tl.minimum(tl.maximum(nulled - chunk_begin, 0), CHUNK)
    if WHOLE:
        low = tl.where(live, 0, CHUNK)
        high = tl.where(live, tl.minimum(gathered_width - chunk_begin, CHUNK), 0)
    else:
        generation = tl.load(generations_ptr + g * max_num_reqs + safe_row, mask=exists, other=0)
        record = tl.load(packet_ptr + safe_row, mask=exists & (num_written_rows > 0), other=-1)
        generation_ptr = packet_ptr + max_num_reqs + 2 * tl.maximum(record, 0) + 1
        staged_generation = tl.load(generation_ptr, mask=record >= 0, other=0)
        generation = tl.where(record >= 0, staged_generation, generation)
        key = tl.where(exists, generation.to(tl.int64) * max_num_reqs + safe_row, -1)
        state = (tl.load(group + STATE_OFFSET) + chunk).to(tl.int64) * max_num_reqs + slot
        old_key = tl.load(state_rows_ptr + state, mask=live, other=-1)
        old_extent = tl.load(state_extents_ptr + 2 * state, mask=live, other=0)
        old_null_extent = tl.load(state_extents_ptr + 2 * state + 1, mask=live, other=0)
        new_low, new_high = changed_columns(old_extent, extent, CHUNK)
        null_low, null_high = changed_columns(old_null_extent, null_extent, CHUNK)
        kept = key == old_key
        low = tl.where(kept, tl.minimum(new_low, null_low), 0)
        high = tl.where(kept, tl.maximum(new_high, null_high), tl.maximum(old_extent, extent))
        # After a dummy run the extents name whole chunks, also in rows that end earlier.
        low = tl.where(live, low, CHUNK)
        high = tl.where(live, tl.minimum(high, gathered_width - chunk_begin), 0)
        # Every warp has loaded the old state, one of them stores the new: without the barrier a
        # late warp would read the new one and copy nothing.
        tl.debug_barrier()
        tl.store(state_rows_ptr + state, key, mask=live)
        tl.store(state_extents_ptr + 2 * state, extent, mask=live)
        tl.store(state_extents_ptr + 2 * state + 1, null_extent, mask=live)
    table = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    source = table + safe_row.to(tl.int64) * width
    target = gathered_ptr + slot.to(tl.int64) * gathered_stride
    first = tl.min(low, axis=0) // COLUMNS * COLUMNS
    last = tl.max(high, axis=0)
    for begin in range(first, last, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        wanted = (column >= low[:, None]) & (column < high[:, None])
        place = chunk_begin + column
        alive = wanted & (place < filled[:, None]) & (place >= nulled[:, None])
        staged = written[:, None] & (place >= start[:, None])
        table_id = tl.load(source[:, None] + place, mask=alive & (staged == 0), other=0)
        staged_ids = ids[:, None] + (place - start[:, None])
        staged_id = tl.load(staged_ids, mask=alive & staged, other=0)
        tl.store(target[:, None] + place, tl.where(staged, staged_id, table_id), mask=wanted)


@triton.jit
def write_chunk(
    descriptor_ptr,
    arena_ptr,
    num_columns_ptr,
    generations_ptr,
    packet_ptr,
    g,
    program,
    num_groups,
    max_num_reqs,
    num_written_rows,
    num_write_chunks,
    RECORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one chunk of the new columns of RECORDS records, and with the first their lengths."""
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    record = (program // num_write_chunks) * RECORDS + tl.arange(0, RECORDS)
    chunk = program % num_write_chunks
    live = record < num_written_rows
    header_ptr = packet_ptr + max_num_reqs + 2 * record
    row = tl.load(header_ptr, mask=live, other=0)
    generation = tl.load(header_ptr + 1, mask=live, other=0)
    records_ptr = packet_ptr + max_num_reqs + 2 * num_written_rows
    fields_ptr = records_ptr + (record * num_groups + g) * 3
    start = tl.load(fields_ptr, mask=live, other=0)
    filled = tl.load(fields_ptr + 1, mask=live, other=0)
    first_id = tl.load(fields_ptr + 2, mask=live, other=0)
    ids = records_ptr + num_written_rows * num_groups * 3 + first_id
    first = live & (chunk == 0)
    tl.store(num_columns_ptr + g * max_num_reqs + row, filled, mask=first)
    tl.store(generations_ptr + g * max_num_reqs + row, generation, mask=first)
    table = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    target = table + row.to(tl.int64) * tl.load(group + WIDTH) + start
    length = filled - start
    end = tl.minimum(tl.max(length, axis=0), (chunk + 1) * CHUNK)
    for begin in range(chunk * CHUNK, end, COLUMNS):
        place = begin + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None] & (place < length[:, None])
        tl.store(
            target[:, None] + place, tl.load(ids[:, None] + place, mask=mask, other=0), mask=mask
        )


@triton.jit
def step_kernel(
    slots_ptr,  # int32 or int64 [G, slots_stride]
    gathered_ptr,  # int32, all groups' gathered tables; WHOLE: int64 [G, 3] address, stride, width
    idx_mapping_ptr,  # int32 or int64 [num_reqs]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    positions_ptr,  # int64 [num_positions]
    replay_start_ptr,  # int32 [num_reqs]; read if REPLAY
    num_computed_ptr,  # int32 [max_num_reqs]; read if null_columns
    packet_ptr,  # int32, see staged_record
    slots_stride,
    capacity,
    num_reqs,
    num_positions,
    num_slots,
    max_chunks,
    null_columns,
    num_written_rows,
    num_write_chunks,
    num_gather,
    num_tiles,
    num_pad,
    query_len_inverse,
    search_steps,
    descriptor_ptr,  # int32 [G, DESCRIPTOR_WIDTH]
    arena_ptr,  # int32, all groups' tables
    num_columns_ptr,  # int32 [G, max_num_reqs]
    generations_ptr,  # int32 [G, max_num_reqs]
    state_rows_ptr,  # int64 [chunks of all groups, max_num_reqs], generation·max_num_reqs + row
    state_extents_ptr,  # int32 [chunks of all groups, max_num_reqs, 2], filled and nulled columns
    faults_ptr,  # int64 [codes + 1, G]
    details_ptr,  # int64, see count_faults
    num_groups,
    max_num_reqs,
    interleave,
    interleave_shift,
    replay_window,
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RECORDS: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    REPLAY: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    g = tl.program_id(0)
    x = tl.program_id(1)
    first_writer = num_gather + num_tiles + num_pad
    if x < num_gather:
        group = descriptor_ptr + g * DESCRIPTOR_WIDTH
        if WHOLE:
            address = tl.load(gathered_ptr + 3 * g)
            table_ptr = address.to(tl.pointer_type(tl.int32))
            stride = tl.load(gathered_ptr + 3 * g + 1)
            table_width = tl.load(gathered_ptr + 3 * g + 2).to(tl.int32)
        else:
            table_ptr = gathered_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
            table_width = tl.load(group + WIDTH)
            stride = table_width.to(tl.int64)
        gather_chunk(
            table_ptr,
            idx_mapping_ptr,
            num_computed_ptr,
            descriptor_ptr,
            arena_ptr,
            num_columns_ptr,
            generations_ptr,
            state_rows_ptr,
            state_extents_ptr,
            packet_ptr,
            faults_ptr,
            details_ptr,
            g,
            x,
            num_reqs,
            num_slots,
            num_groups,
            max_num_reqs,
            max_chunks,
            null_columns,
            num_written_rows,
            stride,
            table_width,
            SLOTS,
            CHUNK,
            COLUMNS,
            POW2,
            WHOLE,
            CHECKED,
        )
    elif x < first_writer:
        given = tl.load(query_start_loc_ptr + num_reqs)
        num_tokens = tl.maximum(tl.minimum(given, tl.minimum(capacity, num_positions)), 0)
        map_or_pad(
            x - num_gather,
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
            packet_ptr,
            num_written_rows,
            TILE,
            PAD_TILE,
            False,
            POW2,
            SHARDED,
            RING,
            REPLAY,
            True,
            CHECKED,
        )
    else:
        write_chunk(
            descriptor_ptr,
            arena_ptr,
            num_columns_ptr,
            generations_ptr,
            packet_ptr,
            g,
            x - first_writer,
            num_groups,
            max_num_reqs,
            num_written_rows,
            num_write_chunks,
            RECORDS,
            CHUNK,
            COLUMNS,
        )
