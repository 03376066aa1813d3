"""The whole step in one launch: staged writes, gathered tables, slot mappings and padding.

Programs of one KV cache group, by program_id(1), in four roles:

1. gather: ENTRIES batch entries each, shared by num_helpers programs (gather.py);
2. tokens: a tile of tokens each (tokens.py);
3. padding: PAD behind the last token tile;
4. writers: RECORDS staged records each, shared by num_write_chunks programs.

There is no barrier, and none is needed: a record names the columns of a row from `start` on. The
writers touch those and nothing else; readers (roles 1 and 2) take columns before `start` from the
table and the others, like row lengths and generations of written rows, from the packet.
"""

import triton
import triton.language as tl

from fused_slots.kernels.gpu.gather import gather_entries
from fused_slots.kernels.gpu.structs import (
    Batch,
    Choices,
    CopyChoices,
    Gather,
    Gathered,
    Output,
    Packet,
    Tables,
)
from fused_slots.kernels.gpu.tokens import map_or_pad
from fused_slots.kernels.layout import DESCRIPTOR_WIDTH, OFFSET, OFFSET_UNIT, WIDTH


@triton.jit
def write_chunk(program, num_write_chunks, generations_ptr, packet, tables, g, choices):
    """Write one chunk of the new columns of RECORDS records, and with the first their lengths.

    A chunk is every num_write_chunks-th tile of COLUMNS columns, however long the records are.
    """
    RECORDS: tl.constexpr = choices.RECORDS
    COLUMNS: tl.constexpr = choices.COLUMNS
    max_num_reqs, num_groups = tables.max_num_reqs, tables.num_groups
    group = tables.descriptor_ptr + g * DESCRIPTOR_WIDTH
    record = (program // num_write_chunks) * RECORDS + tl.arange(0, RECORDS)
    chunk = program % num_write_chunks
    live = record < packet.num_rows
    header_ptr = packet.ptr + max_num_reqs + 2 * record
    row = tl.load(header_ptr, mask=live, other=0)
    generation = tl.load(header_ptr + 1, mask=live, other=0)
    records_ptr = packet.ptr + max_num_reqs + 2 * packet.num_rows
    fields_ptr = records_ptr + (record * num_groups + g) * 3
    start = tl.load(fields_ptr, mask=live, other=0)
    filled = tl.load(fields_ptr + 1, mask=live, other=0)
    first_id = tl.load(fields_ptr + 2, mask=live, other=0)
    ids = records_ptr + packet.num_rows * num_groups * 3 + first_id
    first = live & (chunk == 0)
    tl.store(tables.num_columns_ptr + g * max_num_reqs + row, filled, mask=first)
    tl.store(generations_ptr + g * max_num_reqs + row, generation, mask=first)
    table = tables.arena_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
    # A row that was given back has a negative start: so many zeros for its first cells.
    target = table + row.to(tl.int64) * tl.load(group + WIDTH) + tl.maximum(start, 0)
    length = filled - start
    longest = tl.max(length, axis=0)
    for begin in range(chunk * COLUMNS, longest, num_write_chunks * COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        mask = live[:, None] & (column < length[:, None])
        new_id = tl.load(ids[:, None] + column, mask=mask, other=0)
        tl.store(target[:, None] + column, new_id, mask=mask)


@triton.jit
def step_kernel(
    slots_ptr: "*slot",
    gathered_ptr: "*table",
    idx_mapping_ptr: "*index",
    query_start_loc_ptr: "*i32",
    positions_ptr: "*i64",
    replay_start_ptr: "*i32",
    replay_len_ptr: "*i32",
    num_computed_ptr: "*i32",
    packet_ptr: "*i32",
    slots_stride: "i64",
    capacity: "i32",
    num_reqs: "i32",
    num_positions: "i32",
    num_tokens_padded: "i32",
    replay_window: "i64",
    num_entries: "i32",
    num_helpers: "i32",
    null_columns: "i32",
    num_written_rows: "i32",
    num_write_chunks: "i32",
    num_gather: "i32",
    num_tiles: "i32",
    num_pad: "i32",
    query_len_inverse: "i32",
    search_steps: "i32",
    descriptor_ptr: "*i32",
    arena_ptr: "*i32",
    num_columns_ptr: "*i32",
    generations_ptr: "*i32",
    state_ptr: "*i64",
    faults_ptr: "*i64",
    details_ptr: "*i64",
    num_groups: "i32",
    max_num_reqs: "i32",
    interleave: "i32",
    interleave_shift: "i32",
    TILE: tl.constexpr,
    PAD_TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCH_COST: tl.constexpr,
    PART: tl.constexpr,
    RECORDS: tl.constexpr,
    POW2: tl.constexpr,
    SHARDED: tl.constexpr,
    RING: tl.constexpr,
    NULLS: tl.constexpr,
    REPLAY: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """A step, or the parts of it that a call asks for: grid (num_groups, programs of the roles).

    Args:
        slots_ptr: int32 or int64 [G, slots_stride], written up to the capacity if there are
            num_tiles.
        gathered_ptr: int32 [columns], all groups' gathered tables, as arena_ptr; WHOLE: int64
            [G, 3], address, stride and width of each caller's table.
        idx_mapping_ptr: int32 or int64 [num_reqs], each entry's row.
        query_start_loc_ptr: int32 [num_reqs + 1], each entry's first token.
        positions_ptr: int64 [num_positions], each token's position in its request.
        replay_start_ptr: int32 [num_reqs], each entry's first replayed position; read if REPLAY.
        replay_len_ptr: int32 [num_reqs], how many follow; read if REPLAY and replay_window is -1.
        num_computed_ptr: int32 [max_num_reqs], computed tokens by row; read if null_columns.
        packet_ptr: int32 [packet], staged writes (staged.py); read if num_written_rows.
        slots_stride: int64, elements from one group's slots to the next one's.
        capacity: int32, slots of each group that are written.
        num_reqs: int32, batch entries.
        num_positions: int32, positions that may be read.
        num_tokens_padded: int32, tokens that the caller's view of the slots holds.
        replay_window: int64, replayed tokens of each entry whose replay_start is not 0; -1 = read
            from replay_len_ptr.
        num_entries: int32, entries to bring up to date, those from num_reqs on as dummies.
        num_helpers: int32, programs that share the columns of the same entries.
        null_columns: int32, 1 = columns below the sliding window become 0.
        num_written_rows: int32, staged records of each group.
        num_write_chunks: int32, programs that share the columns of the same records.
        num_gather: int32, programs of a group that gather.
        num_tiles: int32, programs of a group that map tokens.
        num_pad: int32, programs of a group that write PAD behind the last tile.
        query_len_inverse: int32, 2^31 / tokens of each entry where the sizes suggest that all have
            as many (its bits as uint32); 0 = no guess.
        search_steps: int32, steps of the search for a token's entry, each to an eighth.
        descriptor_ptr: int32 [G, DESCRIPTOR_WIDTH], each group's numbers (kernels/layout.py).
        arena_ptr: int32 [columns], all groups' tables, each [max_num_reqs, width].
        num_columns_ptr: int32 [G, max_num_reqs], filled columns of each row.
        generations_ptr: int32 [G, max_num_reqs], how often each row was started anew.
        state_ptr: int64 [num_helpers, G, max_num_reqs, 2], key and extents of each entry.
        faults_ptr: int64 [codes + 1, G], counters that are added to.
        details_ptr: int64 [1 + FAULT_DETAILS * DETAIL_WIDTH], a counter of faults, then the first
            ones; used if CHECKED.
        num_groups: int32, G.
        max_num_reqs: int32, rows of each table.
        interleave: int32, consecutive tokens on one context parallel rank.
        interleave_shift: int32, its log2; used if POW2.
        TILE: tokens that a program maps at a time.
        PAD_TILE: slots that a program pads at a time.
        ENTRIES: batch entries of a gathering program.
        COLUMNS: columns of each entry or record that are copied at a time.
        STRETCH: columns of one entry that are copied at a time by themselves.
        STRETCH_COST: columns of a tile that take as long as one stretch.
        PART: columns of a stretch at a time that is not copied straight.
        RECORDS: staged records of a writing program.
        POW2: every number that positions are divided by is a power of two.
        SHARDED: there is more than one context parallel rank.
        RING: there is a group of rings.
        NULLS: the manager has a null block, which is never written.
        REPLAY: replayed tokens of cacheable groups are PAD.
        WHOLE: rows are copied whole into callers' tables.
        CHECKED: the first faults are recorded one by one.
    """
    g = tl.program_id(0)
    x = tl.program_id(1)
    first_writer = num_gather + num_tiles + num_pad
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
    packet = Packet(packet_ptr, num_written_rows)
    if x < num_gather:
        group = descriptor_ptr + g * DESCRIPTOR_WIDTH
        if WHOLE:
            address = tl.load(gathered_ptr + 3 * g)
            gathered = Gathered(
                address.to(tl.pointer_type(tl.int32)),
                tl.load(gathered_ptr + 3 * g + 1),
                tl.load(gathered_ptr + 3 * g + 2).to(tl.int32),
            )
        else:
            table_ptr = gathered_ptr + tl.load(group + OFFSET).to(tl.int64) * OFFSET_UNIT
            table_width = tl.load(group + WIDTH)
            gathered = Gathered(table_ptr, table_width.to(tl.int64), table_width)
        gather = Gather(
            idx_mapping_ptr,
            num_computed_ptr,
            generations_ptr,
            state_ptr,
            num_reqs,
            num_entries,
            num_helpers,
            null_columns,
        )
        # Built where it is passed: an assignment makes values of constants.
        gather_entries(
            x,
            gathered,
            gather,
            packet,
            tables,
            g,
            CopyChoices(
                ENTRIES, COLUMNS, STRETCH, STRETCH_COST, PART, RECORDS, POW2, WHOLE, CHECKED
            ),
        )
    elif x < first_writer:
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
        output = Output(slots_ptr + g.to(tl.int64) * slots_stride, capacity, num_tiles, num_pad)
        map_or_pad(
            x - num_gather,
            output,
            batch,
            packet,
            tables,
            g,
            Choices(False, POW2, SHARDED, RING, REPLAY, True, NULLS, CHECKED),
            TILE,
            PAD_TILE,
        )
    else:
        write_chunk(
            x - first_writer,
            num_write_chunks,
            generations_ptr,
            packet,
            tables,
            g,
            CopyChoices(
                ENTRIES, COLUMNS, STRETCH, STRETCH_COST, PART, RECORDS, POW2, WHOLE, CHECKED
            ),
        )
