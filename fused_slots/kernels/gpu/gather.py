"""The gather of a step: bring batch entries' rows up to date, copying what changed.

The state is per (group, batch entry): the row and its generation that the entry was copied from,
how many columns it has filled and how many are nulled. A row's generation grows when it is started
anew. Programs that share an entry keep a state each, alike from launch to launch, so that none
reads what another one writes.
"""

import triton
import triton.language as tl

from fused_slots.kernels.common import changed_columns
from fused_slots.kernels.gpu.formula import clamp_row, count_faults, quotient
from fused_slots.kernels.gpu.staged import staged_ids, staged_record
from fused_slots.kernels.gpu.structs import Entry, Source
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


@triton.jit
def batch_entry(entry, live, gather, packet, tables, g, POW2: tl.constexpr):
    """What a batch entry holds: its row, the row's columns, and those below the sliding window."""
    group = tables.descriptor_ptr + g * DESCRIPTOR_WIDTH
    reach = tl.load(group + REACH)
    column_size = tl.load(group + COLUMN_SIZE)
    column_shift = tl.load(group + COLUMN_SHIFT)
    max_num_reqs, null_columns = tables.max_num_reqs, gather.null_columns
    index = tl.load(gather.idx_mapping_ptr + entry, mask=live & (entry < gather.num_reqs), other=-1)
    row = clamp_row(index, max_num_reqs)
    exists = live & (row >= 0) & (row < max_num_reqs)
    row = tl.where(exists, row, 0)
    filled = tl.load(tables.num_columns_ptr + g * max_num_reqs + row, mask=exists, other=0)
    generation = tl.load(gather.generations_ptr + g * max_num_reqs + row, mask=exists, other=0)
    computed = tl.load(gather.num_computed_ptr + row, mask=exists & (null_columns != 0), other=0)
    record, start, filled, first_id = staged_record(packet, row, exists, filled, g, tables)
    written = record >= 0
    start = tl.where(written, start, filled)
    staged_generation = tl.load(
        packet.ptr + max_num_reqs + 2 * tl.maximum(record, 0) + 1, mask=written, other=0
    )
    generation = tl.where(written, staged_generation, generation)
    below = tl.where(reach > 0, tl.maximum(tl.maximum(computed, 0) - reach, 0), 0)
    nulled = quotient(below, column_size, column_shift, POW2)
    nulled = tl.minimum(nulled, filled)
    return Entry(index, exists, row, filled, nulled, generation, start, first_id)


@triton.jit
def gather_entries(program, gathered, gather, packet, tables, g, choices):
    """Bring ENTRIES batch entries up to date; num_helpers programs share their columns.

    Changes are copied together unless copying them one by one takes fewer loads that wait for each
    other: where few of the entries change much, and in long rows.
    """
    ENTRIES: tl.constexpr = choices.ENTRIES
    STRETCH: tl.constexpr = choices.STRETCH
    WHOLE: tl.constexpr = choices.WHOLE
    num_helpers, max_num_reqs = gather.num_helpers, tables.max_num_reqs
    group = tables.descriptor_ptr + g * DESCRIPTOR_WIDTH
    helper = program % num_helpers
    first_entry = (program // num_helpers) * ENTRIES
    entry = first_entry + tl.arange(0, ENTRIES)
    live = entry < gather.num_entries
    # A warp issues loads in this order and stops at the first one whose address it does not have.
    state = gather.state_ptr + (helper * tables.num_groups + g).to(tl.int64) * max_num_reqs * 2
    state = state + entry * 2
    old_key = tl.load(state, mask=live & (WHOLE == 0), other=-1)
    old_extents = tl.load(state + 1, mask=live & (WHOLE == 0), other=0)
    table = tables.arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    width = tl.load(group + WIDTH)
    new = batch_entry(entry, live, gather, packet, tables, g, choices.POW2)
    key = tl.where(new.exists, new.generation.to(tl.int64) * max_num_reqs + new.row, -1)
    if WHOLE:
        low = new.row * 0
        high = low + gathered.width
    else:
        old_filled = (old_extents >> 32).to(tl.int32)
        old_nulled = (old_extents & 0xFFFFFFFF).to(tl.int32)
        low, high = changed_columns(
            key == old_key, new.filled, new.nulled, old_filled, old_nulled, gathered.width
        )
    low, high = tl.where(live, low, 0), tl.where(live, high, 0)
    if helper == 0:
        nowhere = entry * 0 - 1
        too_large = live & (clamp_row(new.index, max_num_reqs) >= max_num_reqs)
        count_faults(
            tables, too_large, ROW_OUT_OF_RANGE, g, new.index, nowhere, nowhere, choices.CHECKED
        )
    source = Source(table, width, staged_ids(packet, tables), helper, num_helpers)
    length = tl.maximum(high - low, 0)
    longest = tl.max(length, axis=0)
    stretches = tl.sum((length + (STRETCH - 1)) // STRETCH, axis=0)
    if longest <= stretches * choices.STRETCH_COST:
        copy_together(low, high, longest, entry, new, source, gathered, choices)
    else:
        end = tl.minimum(first_entry + ENTRIES, gather.num_entries)
        copy_apart(low, high, first_entry, end, entry, new, source, gathered, choices)
    if not WHOLE:
        # All warps have read the old state before one of them writes the new.
        tl.debug_barrier()
        tl.store(state, key, mask=live)
        tl.store(state + 1, (new.filled.to(tl.int64) << 32) | new.nulled.to(tl.int64), mask=live)


@triton.jit
def copy_together(low, high, longest, entry, held, source, gathered, choices):
    """Copy columns [low, high) of all entries by tiles of ENTRIES x COLUMNS, this helper's.

    A tile begins in each entry where its change begins.
    """
    COLUMNS: tl.constexpr = choices.COLUMNS
    table = source.table_ptr + held.row.to(tl.int64) * source.width
    target = gathered.ptr + entry.to(tl.int64) * gathered.stride
    ids_ptr = source.ids_ptr + (held.first_id - held.start)
    for begin in range(source.helper * COLUMNS, longest, source.num_helpers * COLUMNS):
        column = low[:, None] + (begin + tl.arange(0, COLUMNS)[None, :])
        wanted = column < high[:, None]
        alive = wanted & (column < held.filled[:, None]) & (column >= held.nulled[:, None])
        staged = column >= held.start[:, None]
        table_id = tl.load(table[:, None] + column, mask=alive & (staged == 0), other=0)
        staged_id = tl.load(ids_ptr[:, None] + column, mask=alive & staged, other=0)
        tl.store(target[:, None] + column, tl.where(staged, staged_id, table_id), mask=wanted)


@triton.jit
def copy_apart(low, high, first_entry, end, entry, held, source, gathered, choices):
    """Copy columns [low, high) of entries [first_entry, end), one entry after another."""
    for one in range(first_entry, end):
        this = entry == one
        one_high = pick(high, this)
        if one_high > 0:
            only = Entry(
                0,
                True,
                pick(held.row, this),
                pick(held.filled, this),
                pick(held.nulled, this),
                0,
                pick(held.start, this),
                pick(held.first_id, this),
            )
            copy_stretches(pick(low, this), one_high, one, only, source, gathered, choices)


@triton.jit
def pick(values, this):
    """The one element of an int32 tensor that `this` names."""
    return tl.sum(tl.where(this, values, 0), axis=0)


@triton.jit
def copy_stretches(low, high, entry, held, source, gathered, choices):
    """Copy this helper's stretches of columns [low, high) of one batch entry.

    A stretch that lies in the table as a whole is copied four columns an instruction where rows
    begin on multiples of 16 bytes; stretches then do so too, the first up to three columns early,
    which get what they hold. Other stretches are copied in parts, column by column.
    """
    STRETCH: tl.constexpr = choices.STRETCH
    PART: tl.constexpr = choices.PART
    table, width = source.table_ptr, source.width
    vectors = (width % 4 == 0) & (choices.WHOLE == 0)
    low = tl.where(vectors, low & -4, low)
    plain_end = tl.minimum(high, held.start)
    # Another helper begins in each entry, since few have as many stretches as there are helpers.
    first = (source.helper + entry) % source.num_helpers
    for begin in range(low + first * STRETCH, high, source.num_helpers * STRETCH):
        if vectors & (begin >= held.nulled) & (begin + STRETCH <= plain_end):
            # What the compiler may rely on; it sees through a product, not through a condition.
            column = (begin // 4) * 4 + tl.arange(0, STRETCH)
            row_ptr = tl.multiple_of(table + held.row.to(tl.int64) * width, 16)
            target = tl.multiple_of(gathered.ptr + entry * gathered.stride, 16)
            tl.store(target + column, tl.load(row_ptr + column))
        else:
            for part in range(begin, tl.minimum(begin + STRETCH, high), PART):
                column = part + tl.arange(0, PART)
                wanted = column < tl.minimum(begin + STRETCH, high)
                alive = wanted & (column < held.filled) & (column >= held.nulled)
                row_ptr = table + held.row.to(tl.int64) * width
                table_id = tl.load(row_ptr + column, mask=alive & (column < held.start), other=0)
                staged_id = tl.load(
                    source.ids_ptr + (held.first_id - held.start + column),
                    mask=alive & (column >= held.start),
                    other=0,
                )
                value = tl.where(column < held.start, table_id, staged_id)
                tl.store(gathered.ptr + entry * gathered.stride + column, value, mask=wanted)
