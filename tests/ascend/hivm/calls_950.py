"""Library calls of the 950: int64 lanes, integer division, and the llvm operations round them.

int64 lanes live in a one-element cell, as the compiler passes them by reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import UnsupportedOperation, View
from .vectors_950 import (
    COMPARE,
    LANES,
    advance,
    lanes_of,
    lanes_view,
    pointer,
    store_masked,
    with_poison,
)

if TYPE_CHECKING:
    from .parser import Operation


def _truncated_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.trunc(a.astype(np.float64) / b.astype(np.float64))
    return quotient.astype(np.int64).astype(np.int32)


def _divide_lanes(rt: Any, a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask = lanes_of(mask)
    safe = np.where(mask & (b != 0), b, 1)
    return np.where(mask, _truncated_division(a, safe), 0).astype(np.int32)


def _modulo_lanes(rt: Any, a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask = lanes_of(mask)
    return np.where(mask, a - _divide_lanes(rt, a, b, mask) * b, 0).astype(np.int32)


def _load_wide(rt: Any, cell: list[Any], view: View, offset: int) -> None:
    at = View(view.memory, view.dtype, view.base, view.offset + offset, (LANES,), (1,))
    cell[0] = with_poison(view.memory.read(lanes_view(at, min(LANES, view.count))), LANES)


def _store_wide(rt: Any, view: View, offset: int, mask: np.ndarray, cell: list[Any]) -> None:
    at = View(view.memory, view.dtype, view.base, view.offset + offset, (LANES,), (1,))
    store_masked(at, cell[0], mask)


def _set_cell(make: Callable[..., np.ndarray]) -> Callable[..., None]:
    def set_cell(rt: Any, cell: list[Any], *operands: Any) -> None:
        cell[0] = make(*operands)

    return set_cell


_CALLS: dict[str, Callable[..., Any]] = {
    "_mlir_ciface_vdiv_int32_t": _divide_lanes,
    "_mlir_ciface_vmod_int32_t": _modulo_lanes,
    "_mlir_ciface_cast_int64_t_to_int32_t": lambda rt, cell, mask: rt.modes.to_int32(cell[0]),
    "_mlir_ciface_cast_int64_t_to_float": lambda rt, cell, *_: cell[0].astype(np.float32),
    "_mlir_ciface_cast_int32_t_to_int64_t": _set_cell(lambda v, mask: v.astype(np.int64)),
    "_mlir_ciface_vmod_int64_t": lambda rt, out, a, b, mask: out.__setitem__(
        0, np.fmod(a[0], np.where(b[0] == 0, 1, b[0]))
    ),
    "_mlir_ciface_vdups_int64_t": _set_cell(lambda v, mask: np.full(LANES, v, np.int64)),
    "_mlir_ciface_vbr_int64_t": _set_cell(lambda v: np.full(LANES, v, np.int64)),
    "_mlir_ciface_vmuls_int64_t": _set_cell(lambda c, v, mask: c[0] * np.int64(v)),
    "vload_NORM_int64_t_rank1": _load_wide,
    "masked_store_NORM_B64_int64_t_rank1": _store_wide,
}


def _compare_wide(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda rt, a, b, mask: np.asarray(function(a[0], b[0])) & lanes_of(mask)


for _kind, _function in COMPARE.items():
    _CALLS[f"_mlir_ciface_vcmp_{_kind}_int64_t"] = _compare_wide(_function)


def is_call(name: str) -> bool:
    return name.startswith(("_mlir_ciface_", "vload_", "masked_store_"))


def find(name: str) -> Callable[..., Any]:
    if name not in _CALLS:
        raise UnsupportedOperation(f"vector library call @{name}")
    return _CALLS[name]


# Rules for the llvm operations that wrap a memref: a struct of a memref is its View.


def on_extractvalue(translator: Any, op: Operation) -> str:
    match = re.search(r"%([\w-]+)\[(\d)", op.text)
    assert match, op.text
    view = "v" + match.group(1).replace("-", "m")
    if "array<" not in op.text and "ptr<6>, ptr<6>" not in op.text:  # a real pair, no memref
        return f"{view}[{match.group(2)}]"
    return {"1": f"pointer({view})", "2": f"{view}.offset"}[match.group(2)]


def on_getelementptr(translator: Any, op: Operation) -> str:
    base, index = ("v" + operand[1:].replace("-", "m") for operand in op.operands)
    return f"advance({base}, {index})"


def on_alloca(translator: Any, op: Operation) -> str:
    if "vector_2xvl_s64" not in op.text:
        raise UnsupportedOperation(f"llvm.alloca at line {op.line}: {op.text}")
    return "[None]"


def on_bitcast(translator: Any, op: Operation) -> str:
    kind = "float32" if op.text.endswith("f32>") else "int32"
    return f"v{op.operands[0][1:].replace('-', 'm')}.view('{kind}')"


NAMES: dict[str, Any] = {"pointer": pointer, "advance": advance}
