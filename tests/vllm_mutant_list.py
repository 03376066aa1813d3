"""Changes of the v1 tables, vllm-ascend's among them, and of how the plugin waits for it."""

from __future__ import annotations

STORAGE = "fused_slots/vllm/v1_storage.py"
V1 = "fused_slots/vllm/v1.py"
TABLE = "fused_slots/vllm/v1_table.py"
ASCEND = "fused_slots/vllm/ascend_v1.py"
LATE = "fused_slots/vllm/late_import.py"
PLUGIN = "fused_slots/vllm/plugin.py"

V1_TESTS = (
    "tests/test_vllm_v1.py",
    "tests/test_vllm_v1_rows.py",
    "tests/test_vllm_ascend_v1.py",
    "tests/test_vllm_plugin.py",
)

V1_MUTANTS = [
    (
        "one group's commit sends all groups",
        STORAGE,
        " and len(groups) == layout.num_groups",
        "",
    ),
    ("a bool is a row", STORAGE, "if type(row) is int and", "if isinstance(row, int) and"),
    ("ids beyond the pool", STORAGE, "max(group_ids) <= layout.max_block_ids[g]", "True"),
    ("negative ids", STORAGE, "min(group_ids) >= 0 and ", ""),
    ("rows over capacity", STORAGE, "if ids and end > layout.widths[g]:", "if False:"),
    ("the old tail stays", STORAGE, "if end < filled[g]:", "if False:"),
    ("appends overwrite", STORAGE, "begin = 0 if overwrite else filled[g]", "begin = 0"),
    ("overwrites append", STORAGE, "begin = 0 if overwrite else filled[g]", "begin = filled[g]"),
    ("a cleared row's length", STORAGE, "            self.lengths[g, row] = 0\n", ""),
    ("the vacated row stays", STORAGE, "        self.clear_row(src, groups)\n", ""),
    ("a row moved onto itself", STORAGE, "if src == tgt:", "if False:"),
    (
        "swapped lengths",
        STORAGE,
        "            self.lengths[g, pair] = self.lengths[g, swapped]\n",
        "",
    ),
    (
        "lengths sent with every commit",
        STORAGE,
        "if not np.array_equal(new, self._committed[groups, :num_reqs]):",
        "if True:",
    ),
    (
        "lengths of all rows",
        STORAGE,
        "new = self.lengths[groups, :num_reqs]",
        "num_reqs = self.lengths.shape[1]; new = self.lengths[groups]",
    ),
    (
        "draft rows cut to int32",
        STORAGE,
        'self._on_device(as_integers("req_indices", rows)),',
        'self._on_device(as_integers("req_indices", rows)).to(torch.int32),',
    ),
    ("floats are rows of drafts", STORAGE, 'if array.dtype.kind not in "iu":', "if False:"),
    (
        "a uint64 wraps",
        STORAGE,
        "array = np.minimum(array, np.uint64(INT64_MAX))",
        "pass",
    ),
    ("ids multiplied as they come", STORAGE, ".numpy().astype(np.int64, copy=False)", ".numpy()"),
    (
        "replayed positions beyond the capacity",
        STORAGE,
        "num_tokens = min(positions.shape[0], slots.shape[1])",
        "num_tokens = positions.shape[0]",
    ),
    ("rings are not written again", STORAGE, "replayed & self._cacheable", "replayed"),
    ("replay has no end", STORAGE, " & (since < window)", ""),
    (
        "lost row numbers",
        STORAGE,
        "        self._fill_constants()\n        manager",
        "        manager",
    ),
    (
        "lost lengths",
        STORAGE,
        "        manager.init_block_table_layout_tensors()\n",
        "",
    ),
    (
        "the mirror is where tensors are by default",
        STORAGE,
        'int32, device="cpu", pin',
        "int32, pin",
    ),
    ("lengths to write", TABLE, "        self.num_blocks_per_row.flags.writeable = False\n", ""),
    (
        "one group's slots cost the others",
        TABLE,
        "scratch.shape[1], scratch\n",
        "scratch.shape[1]\n",
    ),
    (
        "rows aligned as from 0.26 on",
        V1,
        "_aligned_blocks if max_model_len is None else _aligned_blocks_0_22",
        "_aligned_blocks",
    ),
    (
        "prefill ranks forgotten",
        V1,
        "ranks, rank = pcp_ranks * ranks, pcp_rank * ranks + rank",
        "pass",
    ),
    (
        "drafts mapped alone",
        ASCEND,
        'for a ring, as above."""\n        if self._pads_alone:',
        'for a ring, as above."""\n        if False:',
    ),
    ("drafts of rings", ASCEND, "for g in self._rings:", "for g in ():"),
    (
        "a ring alone is mapped",
        ASCEND,
        'alone = self.rules.rings == "together" and ',
        "alone = False and ",
    ),
    ("slots not aligned", ASCEND, "-(-width // SLOT_ALIGNMENT) * SLOT_ALIGNMENT", "width"),
    ("slots wider than the release's", ASCEND, "            table.narrow_slots(width)\n", ""),
    ("compression forgotten", ASCEND, "return _compressed(blocks, spec) *", "return blocks *"),
    ("ranks' states forgotten", ASCEND, '(ranks if kind == "state" else 1)', "1"),
    ("the last candidate", ASCEND, "    for size in sizes:", "    for size in reversed(sizes):"),
    ("prefill context parallelism served", ASCEND, "if pcp_ranks > 1:", "if False:"),
    (
        "drafts under context parallelism served",
        ASCEND,
        "if dcp_ranks > 1 and num",
        "if False and num",
    ),
    (
        "rings under context parallelism",
        ASCEND,
        'if dcp_ranks > 1 and "ring"',
        'if False and "ring"',
    ),
    ("the 310P served", ASCEND, "    if is_310p():", "    if False:"),
    ("nothing behind the import", LATE, "            self._then()\n", ""),
    ("a wait that never ends", PLUGIN, "    _late.wait_for(set())\n", ""),
    (
        "imported before the engine does",
        PLUGIN,
        "if tables.waits and not _is_loaded(tables):",
        "if 0:",
    ),
]
