"""Mutants of the kernels and of what launches them, killed by interpreted tests."""
# ruff: noqa: E501

from __future__ import annotations

FORMULA = "fused_slots/kernels/gpu/formula.py"
TOKENS = "fused_slots/kernels/gpu/tokens.py"
STAGED = "fused_slots/kernels/gpu/staged.py"
GATHER = "fused_slots/kernels/gpu/gather.py"
STEP = "fused_slots/kernels/gpu/step.py"
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
    INTERPRETED + "test_uncommon_batches.py",
    INTERPRETED + "test_row_writes.py",
    INTERPRETED + "test_simulated.py::test_every_step_agrees_with_both_oracles",
    "--interpreted-steps=150",
    "-k",
    "not by_request",
)
"""Seconds instead of minutes, for there are many mutants."""

KERNEL_MUTANTS = [
    # The mapping
    ("ignore what is replayed", FORMULA, "        wanted = wanted & ((replayed & (group.cacheable != 0)) == 0)\n", "        pass\n"),
    ("replay ends one token late", FORMULA, "(position < start.to(tl.int64) + length)", "(position <= start.to(tl.int64) + length)"),
    ("replay begins one token late", FORMULA, "(position >= start)", "(position > start)"),
    ("replay everywhere", FORMULA, "(replayed & (group.cacheable != 0)) == 0", "replayed == 0"),
    ("negative positions are mapped", FORMULA, " & (position >= 0)\n", "\n"),
    ("state groups are mapped", FORMULA, "    wanted = wanted & (group.kind != KIND_STATE)\n", ""),
    ("the last row does not exist", FORMULA, "(row < tables.max_num_reqs) & (position >= 0)", "(row < tables.max_num_reqs - 1) & (position >= 0)"),
    ("swap rank", FORMULA, "owned = (turn - stripe * group.shards) == group.rank", "owned = (turn - stripe * group.shards) == group.shards - 1 - group.rank"),
    ("ignore the interleave", FORMULA, "local = stripe * tables.interleave + (within", "local = stripe + (within"),
    ("one column a block", FORMULA, "column = block * group.columns_per_block + block_column", "column = block + block_column"),
    ("a ring reads as pages", FORMULA, "column = tl.where(group.kind == KIND_RING, 0, column)", "column = column"),
    ("ring offset from the clamped position", FORMULA, "ring_offset = remainder(position, column_size", "ring_offset = remainder(clamped.to(tl.int64), column_size"),
    ("float32 slots", FORMULA, "slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)", "slot = (block_id.to(tl.float32) * column_size.to(tl.float32) + offset.to(tl.float32)).to(SLOT_DTYPE)"),
    ("int32 slots", FORMULA, "slot = block_id.to(SLOT_DTYPE) * column_size.to(SLOT_DTYPE) + offset.to(SLOT_DTYPE)", "slot = (block_id * column_size + offset).to(SLOT_DTYPE)"),
    ("fault counter of the next code", FORMULA, "tables.faults_ptr + zero + code * tables", "tables.faults_ptr + zero + (code - 1) * tables"),
    ("more records than there is room for", FORMULA, "keep = faulty & (ticket < FAULT_DETAILS)", "keep = faulty & (ticket <= FAULT_DETAILS)"),
    ("no upper clamp of rows", FORMULA, "tl.minimum(tl.maximum(index, -1), max_num_reqs).to(tl.int32)", "tl.maximum(index, -1).to(tl.int32)"),
    ("no clamp of positions", FORMULA, "tl.minimum(tl.maximum(position, -1), INT32_MAX).to(tl.int32)", "position.to(tl.int32)"),
    # Slot mappings
    ("the first request of equal offsets", TOKENS, "<= token).to(tl.int32)", "< token).to(tl.int32)"),
    ("the guess is never checked", TOKENS, "wrong = (token < begin) | ((token >= end) & (last == 0))", "wrong = token < begin"),
    ("the guess is one too high", TOKENS, "entry = tl.minimum(guess.to(tl.int32), batch.num_reqs - 1)", "entry = tl.minimum(guess.to(tl.int32), batch.num_reqs)"),
    ("a probe past the last request", TOKENS, "probe = tl.minimum(found + eighth * stride, batch.num_reqs)", "probe = found + eighth * stride"),
    ("ignore what is staged", TOKENS, "staged = wanted & (record >= 0) & (column >= start)", "staged = wanted & (record > 9999) & (column >= start)"),
    ("staged from the start of the record on only after it", TOKENS, "(record >= 0) & (column >= start)", "(record >= 0) & (column > start)"),
    ("filled from the table, not the packet", STAGED, "filled = tl.where(written, tl.load(fields_ptr + 1, mask=written, other=0), filled)", "filled = filled + 0"),
    ("a column too many", TOKENS, "found = wanted & (column < filled)", "found = wanted & (column <= filled)"),
    ("no fault beyond the row", TOKENS, "missing = wanted & (column >= filled)", "missing = wanted & (column > filled)"),
    ("a ring's fault is a column's", TOKENS, "tl.where(group.kind == KIND_RING, EMPTY_RING, COLUMN_OUT_OF_ROW)", "tl.where(group.kind == KIND_RING, COLUMN_OUT_OF_ROW, COLUMN_OUT_OF_ROW)"),
    ("the column is not held inside the row", TOKENS, "tl.minimum(column, group.width - 1)", "column"),
    ("tile tail not padded", TOKENS, "    tl.store(output.slots_ptr + token, slots, mask=token < output.capacity)\n", "    tl.store(output.slots_ptr + token, slots, mask=live)\n"),
    ("tile beyond the capacity", TOKENS, "    tl.store(output.slots_ptr + token, slots, mask=token < output.capacity)\n", "    tl.store(output.slots_ptr + token, slots)\n"),
    ("padding begins one tile late", TOKENS, "begin = tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) * TILE", "begin = (tl.maximum(tl.cdiv(tl.minimum(given, limit), TILE), num_tiles) + 1) * TILE"),
    ("tiles that were not planned are skipped", TOKENS, "range(x + num_tiles, tl.cdiv(num_tokens, TILE), num_tiles)", "range(x + num_tiles, 0, num_tiles)"),
    ("the null block is written", TOKENS, "        found = found & (null == 0)\n", ""),
    ("one column of the null block", TOKENS, "group.null_column < group.columns_per_block", "group.null_column < 1"),
    ("tokens before the first request are mapped", TOKENS, "        entry = tl.where(token < tl.load(batch.query_start_loc_ptr), -1, entry)\n", ""),
    ("a view is narrow one token late", TOKENS, "if given > batch.num_expected:", "if given > batch.num_expected + 1:"),
    ("one length of replay for all", FORMULA, "by_entry = batch.replay_window < 0", "by_entry = batch.replay_window < -1"),
    ("an end of replay in int32", FORMULA, "start.to(tl.int64) + length)", "(start + length.to(tl.int32)))"),
    ("positions of other entries are repeats", TOKENS, "same & (earlier >= first)", "same"),
    ("a step counts rows by token, too", TOKENS, "    if not choices.STAGED:  #", "    if True:  #"),
    # The gather
    ("ignore the generation", GATHER, "key == old_key, new.filled", "key % max_num_reqs == old_key % max_num_reqs, new.filled"),
    ("every entry is kept", GATHER, "key == old_key, new.filled", "key == key, new.filled"),
    ("old extent not cleared", COMMON, "high = tl.where(kept, high, tl.maximum(old_filled, filled))", "high = tl.where(kept, high, filled)"),
    ("rows grow behind their new end", COMMON, "low = tl.where(same_length, width, tl.minimum(old_filled, filled))", "low = tl.where(same_length, width, tl.maximum(old_filled, filled))"),
    ("nulls come, but never go", COMMON, "tl.where(same_nulls, width, tl.minimum(old_nulled, nulled))", "tl.where(same_nulls, width, old_nulled)"),
    ("one null too many", GATHER, "(column >= held.nulled[:, None])", "(column > held.nulled[:, None])"),
    ("a dummy's row is row 0", GATHER, "mask=exists, other=0)\n    generation", "mask=live, other=0)\n    generation"),
    ("the generation of the table, not the packet", GATHER, "    generation = tl.where(written, staged_generation, generation)\n", ""),
    ("staged columns from the table", GATHER, "staged = column >= held.start[:, None]", "staged = column > held.start[:, None]"),
    ("what is staged is not gathered", GATHER, "start = tl.where(written, start, filled)", "start = filled"),
    ("long rows ignore what is staged", GATHER, "value = tl.where(column < held.start, table_id, staged_id)", "value = table_id"),
    ("a stretch that is nulled in part is copied whole", GATHER, "vectors & (begin >= held.nulled) & (begin + STRETCH", "vectors & (begin + STRETCH"),
    ("a stretch that ends in staged columns is copied from the table", GATHER, "plain_end = tl.minimum(high, held.start)", "plain_end = high"),
    ("helpers leave a gap", GATHER, "longest, source.num_helpers * COLUMNS)", "longest, (source.num_helpers + 1) * COLUMNS)"),
    ("helpers of long rows leave a gap", GATHER, "high, source.num_helpers * STRETCH)", "high, (source.num_helpers + 1) * STRETCH)"),
    ("helpers share one state", GATHER, "(helper * tables.num_groups + g).to(tl.int64)", "g.to(tl.int64)"),
    ("groups share one state", GATHER, "(helper * tables.num_groups + g).to(tl.int64)", "(helper * tables.num_groups).to(tl.int64)"),
    ("the state is never written", GATHER, "        tl.store(state, key, mask=live)\n", ""),
    ("computed tokens below zero wrap", GATHER, "tl.maximum(tl.maximum(computed, 0) - reach, 0)", "tl.maximum(computed - reach, 0)"),
    ("the window reaches one token less", GATHER, "tl.maximum(computed, 0) - reach, 0)", "tl.maximum(computed, 0) - reach + 1, 0)"),
    # The writers
    ("lengths from the next record", STEP, "filled = tl.load(fields_ptr + 1, mask=live, other=0)\n    first_id", "filled = tl.load(fields_ptr + 4, mask=live, other=0)\n    first_id"),
    ("the last new column is not written", STEP, "mask = live[:, None] & (column < length[:, None])", "mask = live[:, None] & (column < length[:, None] - 1)"),
    ("a new column too many", STEP, "mask = live[:, None] & (column < length[:, None])", "mask = live[:, None] & (column <= length[:, None])"),
    ("records are written at column 0", STEP, "tl.load(group + WIDTH) + tl.maximum(start, 0)", "tl.load(group + WIDTH)"),
    ("writers leave a gap", STEP, "range(chunk * COLUMNS, longest, num_write_chunks * COLUMNS)", "range(chunk * COLUMNS, longest, (num_write_chunks + 1) * COLUMNS)"),
    ("a cleared row begins before its first cell", STEP, "+ tl.maximum(start, 0)", "+ start"),
    # What launches them
    ("the tables are clean after a dummy run", GPU, "        self._state[..., 0].fill_(-2)\n", ""),
    ("scribbled rows end where the request does", GPU, "        self._state[..., 1].copy_(self._full_extents.expand(-1, self.layout.max_num_reqs))\n", ""),
    ("fewer rows are dirty", DEVICE, "num_entries = max(num_reqs_padded, self._dirty_rows, self._captured_rows)", "num_entries = num_reqs_padded"),
    ("nulls under context parallelism", GPU, "computed is not None and not self._sharded", "computed is not None"),
]  # fmt: skip
