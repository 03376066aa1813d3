"""vllm-ascend's own kernels, compiled and executed beside ours by the same program.

Nothing of them stands in this repository: `make public-kernels` unpacks the releases that are named
here into `.cache`, and what is run is their text with import lines replaced. "best" is the same
text with the edits of `EDITS`, which take out what triton-ascend 3.2.0 lowers to scalar loops and a
newer compiler, by the times that its authors publish, does not.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from compile import ASCEND_910B3, Variant, cache_directory, compile_variant
from hivm import Execution, Pointers, execute

from bench.ascend_rows import INTERLEAVE
from tests.releases.releases import folder_of

RELEASE = "0.30.0rc2"
ONE_LAUNCH = "vllm_ascend/ops/triton/compute_slot_mapping.py"
EDITS = (
    (r"\)\.to\(tl\.int64\)", ")"),  # query starts stay int32, so token offsets do
    (r"slot_offsets = pos % block_size", "slot_offsets = pos - pos // block_size * block_size"),
)
"""(pattern, replacement) on the text of ONE_LAUNCH, for "best"."""
_IMPORTS = (
    (r"from vllm\.triton_utils import .*", "import triton\nimport triton.language as tl"),
)
PAD = -1


def folder() -> Path:
    """Where the release is unpacked."""
    return folder_of("vllm-ascend", RELEASE)


def is_there() -> bool:
    return (folder() / ONE_LAUNCH).exists()


def replaced(text: str, edits: Iterable[tuple[str, str]]) -> str:
    """A release's text with every edit made, each of which must find its place."""
    for pattern, replacement in edits:
        text, done = re.subn(pattern, replacement, text)
        assert done, f"{pattern} is not in {RELEASE}"
    return text


def imported(name: str, text: str) -> ModuleType:
    """A module of this text; Triton reads a kernel's source from its file."""
    path = cache_directory() / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@cache
def module(*, best: bool) -> ModuleType:
    """The file of the one-launch kernels, as it is or with EDITS. Raises FileNotFoundError."""
    text = replaced((folder() / ONE_LAUNCH).read_text(), (*_IMPORTS, *(EDITS if best else ())))
    return imported(f"public_one_launch_{'best' if best else 'as_is'}", text)


@dataclass(frozen=True)
class Batch:
    """Query lengths and first positions of a batch, and the block size of every group."""

    lengths: list[int]
    first: list[int]
    block_sizes: list[int]
    context: int = 8192
    capacity: int = 0

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, *np.cumsum(self.lengths)], np.int32)

    @property
    def positions(self) -> np.ndarray:
        spans = zip(self.first, self.lengths, strict=True)
        return np.concatenate([np.arange(p, p + n) for p, n in spans]).astype(np.int64)

    @property
    def width(self) -> int:
        return max(self.capacity, sum(self.lengths))

    def table(self, group: int) -> np.ndarray:
        """[requests, columns], int32: ids that tell rows and columns apart."""
        columns = -(-self.context // self.block_sizes[group])
        return np.arange(len(self.lengths) * columns, dtype=np.int32).reshape(-1, columns) + 1

    def slots(self, group: int, ranks: int = 1) -> np.ndarray:
        """What a group's slot mapping must be on the first rank of so many, to the width."""
        size, p = self.block_sizes[group], self.positions
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        block, within = p // (size * ranks), p % (size * ranks)
        stripe, offset = within // INTERLEAVE, within % INTERLEAVE
        local = within if ranks == 1 else stripe // ranks * INTERLEAVE + offset
        found = self.table(group)[rows, block] * size + local
        found[(stripe % ranks) > 0] = PAD
        return np.append(found, np.full(self.width - len(found), PAD)).astype(np.int32)


_TYPES = {np.dtype(np.int32): "*i32", np.dtype(np.int64): "*i64", np.dtype(np.int8): "*i8"}


def one_launch(batch: Batch, *, best: bool, recorded: bool = False) -> Execution:
    """All groups in one launch, in the form that the release chooses; slots are checked."""
    public = module(best=best)
    launched: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    names = [
        "_compute_slot_mapping_fused_groups_kernel",
        "_compute_slot_mapping_fused_groups_adaptive_kernel",
    ]
    kernels = {name: getattr(public, name) for name in names}
    groups = range(len(batch.block_sizes))
    columns = np.array([batch.table(g).shape[1] for g in groups], np.int64)
    sizes = np.array(batch.block_sizes, np.int32)
    outs = [np.full(batch.width, -77, np.int32) for _ in groups]
    at = 9  # arguments before the tables and outputs that the addresses name
    tables, slots = (Pointers([at + off + g for g in groups]) for off in (0, len(outs)))
    try:
        for name, kernel in kernels.items():
            setattr(public, name, _Launcher(kernel, launched.append))
        public.compute_slot_mapping_fused_groups(
            len(outs), len(batch.lengths), sum(batch.lengths), batch.width, batch.starts,
            batch.positions, tables, slots, columns, sizes, min(batch.block_sizes), pad_id=PAD,
            is_circular_ptr=np.zeros(len(outs), np.int32),
        )  # fmt: skip
    finally:
        for name, kernel in kernels.items():
            setattr(public, name, kernel)
    [(kernel, grid, arguments, constants)] = launched
    extra = [*(batch.table(g) for g in groups), *outs]
    done = run(kernel, grid, list(arguments), constants, extra, recorded=recorded)
    for g in groups:
        found = done.outputs[at + len(outs) + g]
        np.testing.assert_array_equal(found, batch.slots(g), f"group {g}")
    return done


def one_group(batch: Batch, *, best: bool, recorded: bool = False) -> Execution:
    """One launch for the first group alone; slots are checked."""
    kernel = module(best=best)._compute_slot_mapping_kernel
    size, table = batch.block_sizes[0], batch.table(0)
    window = 1 << ((1024 + size - 1) // size).bit_length()
    out = np.full(batch.width, -77, np.int32)
    arguments: list[Any] = [sum(batch.lengths), batch.width, batch.starts, batch.positions, table,
                            table.shape[1], size, out]  # fmt: skip
    constants = {
        "KV_CACHE_BLOCK_SIZE": size, "BLOCKS_PER_KV_BLOCK": 1, "TOTAL_CP_WORLD_SIZE": 1,
        "TOTAL_CP_RANK": 0, "CP_KV_CACHE_INTERLEAVE_SIZE": 1, "PAD_ID": PAD,
        "TILE_BLOCK_SIZE": 1024, "BLOCK_TABLE_WINDOW_SIZE": window, "IS_CIRCULAR": False,
    }  # fmt: skip
    grid = (len(batch.lengths) + 1,)
    done = run(kernel, grid, arguments, constants, [], recorded=recorded)
    np.testing.assert_array_equal(done.outputs[7], batch.slots(0))
    return done


class _Launcher:
    """Stands for a kernel while the release's own code chooses a form: notes the launch."""

    def __init__(self, kernel: Any, note: Callable[[Any], None]) -> None:
        self.kernel, self.note = kernel, note

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.note((self.kernel, grid, arguments, constants))


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: list[Any],
    constants: dict[str, Any],
    extra: list[np.ndarray],
    *,
    recorded: bool = False,
) -> Execution:
    """Compile a public kernel for its arguments and execute it; `extra` is memory behind them."""
    names = kernel.arg_names
    constexprs = dict(constants)
    signature = {}
    for name, value in zip(names, arguments, strict=False):
        if value is None:
            constexprs[name] = None
        elif isinstance(value, Pointers):
            signature[name] = "*i64"
        else:
            signature[name] = _TYPES[value.dtype] if isinstance(value, np.ndarray) else "i32"
    label = f"{kernel.__name__}-{'-'.join(map(str, constexprs.values()))}"
    compiled = compile_variant(Variant(label, kernel, signature, constexprs), ASCEND_910B3)
    given = [value for value in arguments if value is not None]
    return execute(compiled.module, grid, given, recorded=recorded, memory=extra)
