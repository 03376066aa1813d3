"""The whole step in one launch: staged writes, gathered tables, slot mappings and padding.

Programs of one KV cache group, by program_id(1), in four roles:

1. gather: SLOTS batch slots each, shared by num_helpers programs; copies what changed since the
   same slot was gathered last;
2. tokens: a tile of tokens each (token_tiles.py);
3. padding: PAD behind the last token tile;
4. writers: RECORDS staged records each, shared by num_write_chunks programs.

There is no barrier, and none is needed: a record names the columns of a row from `start` on. The
writers touch those and nothing else; readers (roles 1 and 2) take columns before `start` from the
table and the others, like row lengths and generations of written rows, from the packet.

The gather's state is per (group, batch slot): the row and its generation that the slot was copied
from, how many columns it has filled and how many are nulled. A row's generation grows when it is
started anew. Programs that share a slot keep a state each, alike from launch to launch, so that
none reads what another one writes.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import changed_columns
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
from fused_slots.kernels.mapping import (
    clamp_row,
    count_faults,
    quotient,
)
from fused_slots.kernels.staged import staged_ids, staged_record
from fused_slots.kernels.token_tiles import map_or_pad


@triton.jit
def batch_slot(
    slot,
    live,
    idx_mapping_ptr,
    num_computed_ptr,
    num_columns_ptr,
    generations_ptr,
    packet_ptr,
    reach,
    column_size,
    column_shift,
    g,
    num_reqs,
    num_groups,
    max_num_reqs,
    null_columns,
    num_written_rows,
    POW2: tl.constexpr,
):
    """What a batch slot holds: its row, the row's columns, and those below the sliding window.

    Returns:
        idx_mapping's entry, whether the row exists, the row, its filled and its nulled columns,
        its generation, its first column that this launch writes (`filled` = none), and the place
        of its first staged id.
    """
    index = tl.load(idx_mapping_ptr + slot, mask=live & (slot < num_reqs), other=-1)
    row = clamp_row(index, max_num_reqs)
    exists = live & (row >= 0) & (row < max_num_reqs)
    row = tl.where(exists, row, 0)
    filled = tl.load(num_columns_ptr + g * max_num_reqs + row, mask=exists, other=0)
    generation = tl.load(generations_ptr + g * max_num_reqs + row, mask=exists, other=0)
    computed = tl.load(num_computed_ptr + row, mask=exists & (null_columns != 0), other=0)
    record, start, filled, first_id = staged_record(
        packet_ptr, num_written_rows, row, exists, filled, g, num_groups, max_num_reqs
    )
    written = record >= 0
    start = tl.where(written, start, filled)
    staged_generation = tl.load(
        packet_ptr + max_num_reqs + 2 * tl.maximum(record, 0) + 1, mask=written, other=0
    )
    generation = tl.where(written, staged_generation, generation)
    below = tl.where(reach > 0, tl.maximum(computed - reach, 0), 0)
    nulled = quotient(below, column_size, column_shift, POW2)
    nulled = tl.minimum(nulled, filled)
    return index, exists, row, filled, nulled, generation, start, first_id


@triton.jit
def gather_slots(
    gathered_ptr,
    gathered_stride,
    gathered_width,
    idx_mapping_ptr,
    num_computed_ptr,
    descriptor_ptr,
    arena_ptr,
    num_columns_ptr,
    generations_ptr,
    state_ptr,
    packet_ptr,
    faults_ptr,
    details_ptr,
    g,
    program,
    num_reqs,
    num_slots,
    num_groups,
    max_num_reqs,
    num_helpers,
    null_columns,
    num_written_rows,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    RUN_COST: tl.constexpr,
    PART: tl.constexpr,
    POW2: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Bring SLOTS batch slots up to date; num_helpers programs share their columns.

    Changes are copied together, a tile of SLOTS x COLUMNS at a time that begins in each slot where
    its change begins, unless copying them one by one, RUN columns at a time, takes fewer loads
    that wait for each other: where few of the slots change much, and in long rows.
    """
    group = descriptor_ptr + g * DESCRIPTOR_WIDTH
    helper = program % num_helpers
    first_slot = (program // num_helpers) * SLOTS
    slot = first_slot + tl.arange(0, SLOTS)
    live = slot < num_slots
    # A warp issues loads in this order and stops at the first one whose address it does not have.
    state = state_ptr + (helper * num_groups + g).to(tl.int64) * max_num_reqs * 2 + slot * 2
    old_key = tl.load(state, mask=live & (WHOLE == 0), other=-1)
    old_extents = tl.load(state + 1, mask=live & (WHOLE == 0), other=0)
    table = arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    width = tl.load(group + WIDTH)
    index, exists, row, filled, nulled, generation, start, first_id = batch_slot(
        slot,
        live,
        idx_mapping_ptr,
        num_computed_ptr,
        num_columns_ptr,
        generations_ptr,
        packet_ptr,
        tl.load(group + REACH),
        tl.load(group + COLUMN_SIZE),
        tl.load(group + COLUMN_SHIFT),
        g,
        num_reqs,
        num_groups,
        max_num_reqs,
        null_columns,
        num_written_rows,
        POW2,
    )
    key = tl.where(exists, generation.to(tl.int64) * max_num_reqs + row, -1)
    if WHOLE:
        low = row * 0
        high = low + gathered_width
    else:
        old_filled = (old_extents >> 32).to(tl.int32)
        old_nulled = (old_extents & 0xFFFFFFFF).to(tl.int32)
        low, high = changed_columns(
            key == old_key, filled, nulled, old_filled, old_nulled, gathered_width
        )
    low, high = tl.where(live, low, 0), tl.where(live, high, 0)
    if helper == 0:
        nowhere = slot * 0 - 1
        too_large = live & (clamp_row(index, max_num_reqs) >= max_num_reqs)
        count_faults(
            faults_ptr,
            details_ptr,
            too_large,
            ROW_OUT_OF_RANGE,
            g,
            num_groups,
            index,
            nowhere,
            nowhere,
            CHECKED,
        )
    ids_ptr = staged_ids(packet_ptr, num_written_rows, num_groups, max_num_reqs)
    length = tl.maximum(high - low, 0)
    longest = tl.max(length, axis=0)
    runs = tl.sum((length + (RUN - 1)) // RUN, axis=0)
    if longest <= runs * RUN_COST:
        source = table + row.to(tl.int64) * width
        target = gathered_ptr + slot.to(tl.int64) * gathered_stride
        for begin in range(helper * COLUMNS, longest, num_helpers * COLUMNS):
            column = low[:, None] + (begin + tl.arange(0, COLUMNS)[None, :])
            wanted = column < high[:, None]
            alive = wanted & (column < filled[:, None]) & (column >= nulled[:, None])
            staged = column >= start[:, None]
            table_id = tl.load(source[:, None] + column, mask=alive & (staged == 0), other=0)
            staged_ids_ptr = ids_ptr + (first_id - start)[:, None] + column
            staged_id = tl.load(staged_ids_ptr, mask=alive & staged, other=0)
            tl.store(target[:, None] + column, tl.where(staged, staged_id, table_id), mask=wanted)
    else:
        for one in range(first_slot, tl.minimum(first_slot + SLOTS, num_slots)):
            this = slot == one
            one_high = pick(high, this)
            if one_high > 0:
                copy_runs(
                    table,
                    pick(row, this),
                    width,
                    gathered_ptr,
                    one,
                    gathered_stride,
                    ids_ptr,
                    pick(first_id, this),
                    pick(low, this),
                    one_high,
                    pick(filled, this),
                    pick(nulled, this),
                    pick(start, this),
                    helper,
                    num_helpers,
                    RUN,
                    PART,
                    WHOLE,
                )
    if not WHOLE:
        # All warps have read the old state before one of them writes the new.
        tl.debug_barrier()
        tl.store(state, key, mask=live)
        tl.store(state + 1, (filled.to(tl.int64) << 32) | nulled.to(tl.int64), mask=live)


@triton.jit
def pick(values, this):
    """The one element of an int32 tensor that `this` names."""
    return tl.sum(tl.where(this, values, 0), axis=0)


@triton.jit
def copy_runs(
    table,
    row,
    width,
    gathered_ptr,
    slot,
    gathered_stride,
    ids_ptr,
    first_id,
    low,
    high,
    filled,
    nulled,
    start,
    helper,
    num_helpers,
    RUN: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Copy this helper's runs of columns [low, high) of one batch slot.

    A run that lies in the table as a whole is copied four columns an instruction where rows begin
    on multiples of 16 bytes; runs then do so too, the first up to three columns early, which get
    what they hold. Other runs are copied in parts, column by column.
    """
    vectors = (width % 4 == 0) & (WHOLE == 0)
    low = tl.where(vectors, low & -4, low)
    plain_end = tl.minimum(high, start)
    # Another helper begins in each slot, since few have as many runs as there are helpers.
    first = (helper + slot) % num_helpers
    for begin in range(low + first * RUN, high, num_helpers * RUN):
        if vectors & (begin >= nulled) & (begin + RUN <= plain_end):
            # What the compiler may rely on; it sees through a product, not through a condition.
            column = (begin // 4) * 4 + tl.arange(0, RUN)
            source = tl.multiple_of(table + row.to(tl.int64) * width, 16)
            target = tl.multiple_of(gathered_ptr + slot * gathered_stride, 16)
            tl.store(target + column, tl.load(source + column))
        else:
            for part in range(begin, tl.minimum(begin + RUN, high), PART):
                column = part + tl.arange(0, PART)
                wanted = column < tl.minimum(begin + RUN, high)
                alive = wanted & (column < filled) & (column >= nulled)
                source = table + row.to(tl.int64) * width
                table_id = tl.load(source + column, mask=alive & (column < start), other=0)
                staged_id = tl.load(
                    ids_ptr + (first_id - start + column), mask=alive & (column >= start), other=0
                )
                value = tl.where(column < start, table_id, staged_id)
                tl.store(gathered_ptr + slot * gathered_stride + column, value, mask=wanted)


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
    COLUMNS: tl.constexpr,
):
    """Write one chunk of the new columns of RECORDS records, and with the first their lengths.

    A chunk is every num_write_chunks-th run of COLUMNS columns, however long the records are.
    """
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
    longest = tl.max(length, axis=0)
    for begin in range(chunk * COLUMNS, longest, num_write_chunks * COLUMNS):
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
    num_helpers,
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
    state_ptr,  # int64 [num_helpers, G, max_num_reqs, 2], key and extents of each batch slot
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
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    RUN_COST: tl.constexpr,
    PART: tl.constexpr,
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
        gather_slots(
            table_ptr,
            stride,
            table_width,
            idx_mapping_ptr,
            num_computed_ptr,
            descriptor_ptr,
            arena_ptr,
            num_columns_ptr,
            generations_ptr,
            state_ptr,
            packet_ptr,
            faults_ptr,
            details_ptr,
            g,
            x,
            num_reqs,
            num_slots,
            num_groups,
            max_num_reqs,
            num_helpers,
            null_columns,
            num_written_rows,
            SLOTS,
            COLUMNS,
            RUN,
            RUN_COST,
            PART,
            POW2,
            WHOLE,
            CHECKED,
        )
    elif x < first_writer:
        map_or_pad(
            x - num_gather,
            num_tiles,
            num_pad,
            num_positions,
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
            COLUMNS,
        )
