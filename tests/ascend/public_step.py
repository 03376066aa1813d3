"""A step of vllm-ascend's v2 runner on public kernels: writes, gather and slots, three launches.

Slots are vllm-ascend's, writes and gather are vLLM's own, which vllm-ascend runs. The kernels are
cut out of the releases' files (see public_kernels.py) and stand in a module with Triton's imports.
Not counted, since they are no kernels: the copies of row lengths and staged ids to the device.
"""

from __future__ import annotations

import ast
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from hivm import Execution, Pointers
from public_kernels import PAD, RELEASE, Batch, folder_of, imported, replaced, run

from bench.ascend_rows import INTERLEAVE

VLLM = "0.30.0"
KERNELS = (
    ("vllm", VLLM, "vllm/v1/worker/gpu/buffer_utils.py", ("_load_ptr", "_apply_write_kernel")),
    ("vllm", VLLM, "vllm/v1/worker/gpu/block_table.py", ("_gather_block_tables_kernel",)),
    (
        "vllm-ascend",
        RELEASE,
        "vllm_ascend/ops/triton/v2/block_table/compute_slot_mappings.py",
        ("_compute_slot_mappings_kernel",),
    ),
)
EDITS = (
    (r"is_local = virtual_block_offsets // CP_INTERLEAVE % CP_SIZE == cp_rank",
     "is_local = virtual_block_offsets // CP_INTERLEAVE - virtual_block_offsets // CP_INTERLEAVE"
     " // CP_SIZE * CP_SIZE == cp_rank"),
    (r"remainder = virtual_block_offsets % CP_INTERLEAVE",
     "remainder = virtual_block_offsets - virtual_block_offsets // CP_INTERLEAVE * CP_INTERLEAVE"),
)  # fmt: skip
"""(pattern, replacement) on the text of KERNELS, for "best"."""
TILE = 1024


@cache
def module(*, best: bool) -> ModuleType:
    """The kernels, as they are or with EDITS. Raises FileNotFoundError."""
    parts = ["import triton\nimport triton.language as tl\n"]
    for distribution, version, path, names in KERNELS:
        text = (folder_of(distribution, version) / path).read_text()
        lines = text.splitlines(keepends=True)
        found = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
        for name in names:
            node = found[name]
            parts.append("".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]))
    text = "\n\n".join(parts)
    return imported(
        f"public_step_{'best' if best else 'as_is'}", replaced(text, EDITS) if best else text
    )


def writes_of(batch: Batch, ranks: int) -> list[tuple[int, int, int, int]]:
    """(group, row, first column, end): columns that begin with one of its tokens."""
    found = []
    for g, size in enumerate(batch.block_sizes):
        of_block = size * ranks
        for row, (first, length) in enumerate(zip(batch.first, batch.lengths, strict=True)):
            begin, end = -(-first // of_block), -(-(first + length) // of_block)
            if begin < end:
                found.append((g, row, begin, end))
    return found


def public_step(
    batch: Batch, *, best: bool, recorded: bool = False, ranks: int = 1
) -> list[Execution]:
    """The launches of a step: writes if there are any, gather, slots. Results are checked."""
    kernels = module(best=best)
    groups = range(len(batch.block_sizes))
    launches = []
    tables = [batch.table(g) for g in groups]
    strides = np.array([table.shape[1] for table in tables], np.int64)
    written = writes_of(batch, ranks)
    before = [table.copy() for table in tables]
    if written:
        for g, row, begin, end in written:
            before[g][row, begin:end] = 0
        contents = np.concatenate([tables[g][row, b:e] for g, row, b, e in written])
        ends = np.cumsum([e - b for *_, b, e in written]).astype(np.int32)
        columns = [np.array(column, np.int32) for column in zip(*written, strict=True)]
        arguments: list[Any] = [
            Pointers([7 + g for g in groups]), strides, columns[1], columns[2], contents, ends,
            columns[0],
        ]  # fmt: skip
        constants = {"BLOCK_SIZE": TILE, "MULTI_GROUP": True}
        done = run(kernels._apply_write_kernel, (len(written),), arguments, constants, before,
                   recorded=recorded)  # fmt: skip
        for g in groups:
            np.testing.assert_array_equal(done.outputs[7 + g], tables[g])
        launches.append(done)
    launches.append(_gathered(kernels, batch, tables, strides, recorded))
    launches.append(_mapped(kernels, batch, tables, strides, recorded, ranks))
    return launches


def _gathered(
    kernels: ModuleType, batch: Batch, tables: list[np.ndarray], strides: np.ndarray, recorded: bool
) -> Execution:
    groups, rows = range(len(tables)), len(batch.lengths)
    lengths = np.array([[t.shape[1]] * rows for t in tables], np.int32)
    out = [np.full_like(table, -77) for table in tables]
    index = np.arange(rows, dtype=np.int32)
    arguments = [
        index, Pointers([7 + g for g in groups]), Pointers([7 + len(groups) + g for g in groups]),
        strides, lengths, rows, rows,
    ]  # fmt: skip
    done = run(kernels._gather_block_tables_kernel, (len(groups), rows), arguments,
               {"BLOCK_SIZE": TILE}, [*tables, *out], recorded=recorded)  # fmt: skip
    for g in groups:
        found = done.outputs[7 + len(groups) + g]
        np.testing.assert_array_equal(found, tables[g])
    return done


def _mapped(
    kernels: ModuleType,
    batch: Batch,
    tables: list[np.ndarray],
    strides: np.ndarray,
    recorded: bool,
    ranks: int,
) -> Execution:
    groups, rows = range(len(tables)), len(batch.lengths)
    sizes = np.array(batch.block_sizes, np.int32)
    out = np.full((len(groups), batch.width), -77, np.int32)
    window = TILE + min(batch.block_sizes) - 1
    window = 1 << (window // min(batch.block_sizes)).bit_length()
    arguments = [
        batch.width, np.arange(rows, dtype=np.int32), batch.starts, batch.positions,
        Pointers([11 + g for g in groups]), strides, sizes, sizes, out, batch.width, 0,
    ]  # fmt: skip
    constants = {
        "CP_SIZE": ranks, "CP_INTERLEAVE": INTERLEAVE, "PAD_ID": PAD,
        "TRITON_BLOCK_SIZE": TILE, "BLOCK_TABLE_WINDOW_SIZE": window,
        "slot_mapping_enabled": None, "HAS_SLOT_MAPPING_ENABLED": False,
    }  # fmt: skip
    done = run(kernels._compute_slot_mappings_kernel, (len(groups), rows + 1), arguments,
               constants, tables, recorded=recorded)  # fmt: skip
    for g in groups:
        np.testing.assert_array_equal(done.outputs[8][g], batch.slots(g, ranks), f"group {g}")
    return done
