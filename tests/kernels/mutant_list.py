"""Mutants of the kernels and of what launches them, killed by interpreted tests."""
# ruff: noqa: E501

from __future__ import annotations

MAPPING = "fused_slots/kernels/mapping.py"
TILES = "fused_slots/kernels/token_tiles.py"
STAGED = "fused_slots/kernels/staged.py"
STEP = "fused_slots/kernels/step.py"
COMMON = "fused_slots/kernels/common.py"
GPU = "fused_slots/backends/gpu.py"
DEVICE = "fused_slots/backends/device.py"
PACKET = "fused_slots/host/packet.py"

INTERPRETED = "tests/kernels/interpreted/"

KERNEL_TESTS = (
    INTERPRETED + "test_incremental_cost.py",
    INTERPRETED + "test_big_steps.py",
    INTERPRETED
    + "test_incremental_gather.py::test_window_advances_falls_back_and_is_absent[one call]",
    INTERPRETED + "test_incremental_gather.py::test_callers_scribble_over_dummy_tables[one call-4]",
    INTERPRETED + "test_incremental_gather.py::test_random_lives[one call-1]",
    INTERPRETED + "test_incremental_gather.py::test_random_lives[three calls-2]",
    INTERPRETED + "test_long_rows.py::test_rows_of_several_chunks[one call]",
    INTERPRETED + "test_fault_classes.py::test_slot_beyond_int32_is_exact_in_int64",
    INTERPRETED + "test_fault_classes.py::test_ring_without_a_block_is_padded_and_counted",
    INTERPRETED + "test_simulated.py::test_every_step_agrees_with_both_oracles",
    "--interpreted-steps=150",
    "-k",
    "not by_request",
)
"""Seconds instead of minutes, for there are many mutants."""

KERNEL_MUTANTS = [
    # The mapping
    ("ignore the replay window", MAPPING, "        wanted = wanted & (replayed == 0)\n", ""),
    ("replay ends one token late", MAPPING, "(position - replay_window < replay_start)", "(position - replay_window <= replay_start)"),
    ("replay begins one token late", MAPPING, "(replay_start <= position)", "(replay_start < position)"),
    ("replay everywhere", MAPPING, "& (replay_start <= position) & (cacheable != 0)", "& (replay_start <= position)"),
    ("negative positions are mapped", MAPPING, " & (position >= 0) & (kind != KIND_NONE)", " & (kind != KIND_NONE)"),
    ("state groups are mapped", MAPPING, " & (position >= 0) & (kind != KIND_NONE)", " & (position >= 0)"),
    ("the last row does not exist", MAPPING, "(row < max_num_reqs) & (position >= 0)", "(row < max_num_reqs - 1) & (position >= 0)"),
    ("swap rank", MAPPING, "mine = (run - stripe * shards) == rank", "mine = (run - stripe * shards) == shards - 1 - rank"),
    ("ignore the interleave", MAPPING, "local = stripe * interleave + (within_block - run * interleave)", "local = stripe + (within_block - run * interleave)"),
    ("one column a block", MAPPING, "column = block * columns_per_block + block_column", "column = block + block_column"),
    ("a ring reads as pages", MAPPING, "column = tl.where(kind == KIND_RING, 0, column)", "column = column"),
    ("ring offset from the clamped position", MAPPING, "ring_offset = remainder(position, column_size, POW2)", "ring_offset = remainder(place.to(tl.int64), column_size, POW2)"),
    ("float32 slots", MAPPING, "slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)", "slot = (block_id.to(tl.float32) * column_size.to(tl.float32) + offset.to(tl.float32)).to(SLOT_DTYPE)"),
    ("int32 slots", MAPPING, "slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)", "slot = (block_id * column_size + offset).to(SLOT_DTYPE)"),
    ("fault counter of the next code", MAPPING, "faults_ptr + zero + code * num_groups + g", "faults_ptr + zero + (code - 1) * num_groups + g"),
    ("more records than there is room for", MAPPING, "keep = faulty & (ticket < FAULT_DETAILS)", "keep = faulty & (ticket <= FAULT_DETAILS)"),
    ("no upper clamp of rows", MAPPING, "tl.minimum(tl.maximum(index, -1), max_num_reqs).to(tl.int32)", "tl.maximum(index, -1).to(tl.int32)"),
    ("no clamp of positions", MAPPING, "tl.minimum(tl.maximum(position, -1), INT32_MAX).to(tl.int32)", "position.to(tl.int32)"),
    # Slot mappings
    ("the first request of equal offsets", TILES, "<= token).to(tl.int32)", "< token).to(tl.int32)"),
    ("the guess is never checked", TILES, "wrong = (token < begin) | ((token >= end) & (last == 0))", "wrong = token < begin"),
    ("the guess is one too high", TILES, "entry = tl.minimum(guess.to(tl.int32), num_reqs - 1)", "entry = tl.minimum(guess.to(tl.int32), num_reqs)"),
    ("a probe past the last request", TILES, "probe = tl.minimum(found + eighth * stride, num_reqs)", "probe = found + eighth * stride"),
    ("ignore what is staged", TILES, "staged = wanted & (record >= 0) & (column >= start)", "staged = wanted & (record > 9999) & (column >= start)"),
    ("staged from the start of the record on only after it", TILES, "(record >= 0) & (column >= start)", "(record >= 0) & (column > start)"),
    ("filled from the table, not the packet", STAGED, "filled = tl.where(written, tl.load(fields_ptr + 1, mask=written, other=0), filled)", "filled = filled + 0"),
    ("a column too many", TILES, "found = wanted & (column < filled)", "found = wanted & (column <= filled)"),
    ("no fault beyond the row", TILES, "missing = wanted & (column >= filled)", "missing = wanted & (column > filled)"),
    ("a ring's fault is a column's", TILES, "tl.where(kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)", "tl.where(kind == KIND_RING, COLUMN_OUT_OF_ROW, COLUMN_OUT_OF_ROW)"),
    ("the column is not held inside the row", TILES, "tl.minimum(column, width - 1)", "column"),
    ("tile tail not padded", TILES, "    tl.store(group_slots_ptr + token, slots, mask=token < capacity)\n", "    tl.store(group_slots_ptr + token, slots, mask=live)\n"),
    ("tile beyond the capacity", TILES, "    tl.store(group_slots_ptr + token, slots, mask=token < capacity)\n", "    tl.store(group_slots_ptr + token, slots)\n"),
    ("padding begins one tile late", TILES, "begin = tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) * TILE", "begin = (tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) + 1) * TILE"),
    ("tiles that were not planned are skipped", TILES, "range(x + num_tiles, tl.cdiv(num_tokens, TILE), num_tiles)", "range(x + num_tiles, 0, num_tiles)"),
    # The gather
    ("ignore the generation", STEP, "key == old_key, filled", "key % max_num_reqs == old_key % max_num_reqs, filled"),
    ("every slot is kept", STEP, "key == old_key, filled", "key == key, filled"),
    ("old extent not cleared", COMMON, "high = tl.where(kept, high, tl.maximum(old_filled, filled))", "high = tl.where(kept, high, filled)"),
    ("rows grow behind their new end", COMMON, "low = tl.where(same_length, width, tl.minimum(old_filled, filled))", "low = tl.where(same_length, width, tl.maximum(old_filled, filled))"),
    ("nulls come, but never go", COMMON, "tl.where(same_nulls, width, tl.minimum(old_nulled, nulled))", "tl.where(same_nulls, width, old_nulled)"),
    ("one null too many", STEP, "(column < filled[:, None]) & (column >= nulled[:, None])", "(column < filled[:, None]) & (column > nulled[:, None])"),
    ("a dummy's row is row 0", STEP, "mask=exists, other=0)\n    generation", "mask=live, other=0)\n    generation"),
    ("the generation of the table, not the packet", STEP, "    generation = tl.where(written, staged_generation, generation)\n", ""),
    ("staged columns from the table", STEP, "staged = column >= start[:, None]", "staged = column > start[:, None]"),
    ("what is staged is not gathered", STEP, "start = tl.where(written, start, filled)", "start = filled"),
    ("long rows ignore what is staged", STEP, "value = tl.where(column < start, table_id, staged_id)", "value = table_id"),
    ("a run that is nulled in part is copied whole", STEP, "vectors & (begin >= nulled) & (begin + RUN", "vectors & (begin + RUN"),
    ("a run that ends in staged columns is copied from the table", STEP, "plain_end = tl.minimum(high, start)", "plain_end = high"),
    ("helpers leave a gap", STEP, "range(helper * COLUMNS, longest, num_helpers * COLUMNS)", "range(helper * COLUMNS, longest, (num_helpers + 1) * COLUMNS)"),
    ("helpers of long rows leave a gap", STEP, "range(low + first * RUN, high, num_helpers * RUN)", "range(low + first * RUN, high, (num_helpers + 1) * RUN)"),
    ("helpers share one state", STEP, "state = state_ptr + (helper * num_groups + g).to(tl.int64)", "state = state_ptr + g.to(tl.int64)"),
    ("groups share one state", STEP, "state = state_ptr + (helper * num_groups + g).to(tl.int64)", "state = state_ptr + (helper * num_groups).to(tl.int64)"),
    ("the state is never written", STEP, "        tl.store(state, key, mask=live)\n", ""),
    ("the window reaches one token less", STEP, "tl.maximum(computed - reach, 0)", "tl.maximum(computed - reach + 1, 0)"),
    # The writers
    ("lengths from the next record", STEP, "filled = tl.load(fields_ptr + 1, mask=live, other=0)\n    first_id", "filled = tl.load(fields_ptr + 4, mask=live, other=0)\n    first_id"),
    ("the last new column is not written", STEP, "mask = live[:, None] & (place < length[:, None])", "mask = live[:, None] & (place < length[:, None] - 1)"),
    ("a new column too many", STEP, "mask = live[:, None] & (place < length[:, None])", "mask = live[:, None] & (place <= length[:, None])"),
    ("records are written at column 0", STEP, "tl.load(group + WIDTH) + start", "tl.load(group + WIDTH)"),
    ("writers leave a gap", STEP, "range(chunk * COLUMNS, longest, num_write_chunks * COLUMNS)", "range(chunk * COLUMNS, longest, (num_write_chunks + 1) * COLUMNS)"),
    # What launches them
    ("the tables are clean after a dummy run", GPU, "        self._state[..., 0].fill_(-2)\n", ""),
    ("scribbled rows end where the request does", GPU, "        self._state[..., 1].copy_(self._full_extents.expand(-1, self.layout.max_num_reqs))\n", ""),
    ("fewer rows are dirty", DEVICE, "num_entries = max(num_reqs_padded, self._dirty_rows, self._captured_rows)", "num_entries = num_reqs_padded"),
    ("nulls under context parallelism", GPU, "num_computed_tokens is not None and not self._sharded", "num_computed_tokens is not None"),
]  # fmt: skip
