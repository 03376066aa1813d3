"""The register vectors of the 950: intrinsics on 64 lanes of 32 bits, in NumPy.

On 950 the compiler writes vector functions itself instead of calling a library: a loop that loads
64 lanes from UB, works on them and stores them. A pointer into UB is a one-dimensional `View`
that ends where its buffer does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import UnsupportedOperation, View

LANES = 64
_PATTERN = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 16, 7: 32, 8: 64}  # lanes that a pge code switches on
_NORMAL_LOAD, _BROADCAST_LOAD, _NORMAL_STORE, _FIRST_LANE_STORE = 0, 3, 2, 5


def predicate(pattern: int, _: int) -> np.ndarray:
    if pattern not in _PATTERN:
        raise UnsupportedOperation(f"predicate pattern {pattern}")
    return np.arange(LANES) < _PATTERN[pattern]


def predicate_bits(pattern: int, _: int) -> np.ndarray:
    """A byte-wise predicate: its first bytes, or all (0)."""
    if pattern and pattern not in _PATTERN:
        raise UnsupportedOperation(f"byte predicate pattern {pattern}")
    return np.arange(4 * LANES) < _PATTERN.get(pattern, 4 * LANES)


def interleave(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two byte-wise predicates woven together; twice over, bit i comes to stand at lane i."""
    woven = np.stack([low, high], 1).reshape(-1)
    return woven[: 4 * LANES], woven[4 * LANES :]


def lanes_of(mask: np.ndarray) -> np.ndarray:
    """A predicate on 64 lanes: of a byte-wise one every fourth bit counts."""
    return mask[::4] if mask.size == 4 * LANES else mask


def same_size(*masks: np.ndarray) -> list[np.ndarray]:
    """Byte-wise predicates as they are if all are, else every one on 64 lanes."""
    if all(mask.size == 4 * LANES for mask in masks):
        return list(masks)
    return [lanes_of(mask) for mask in masks]


def lanes_view(pointer: View, count: int) -> View:
    return View(pointer.memory, pointer.dtype, pointer.base, pointer.offset, (count,), (1,))


def load_lanes(pointer: View, offset: int, distribution: int, post: int) -> np.ndarray:
    """64 lanes; those past the end of the buffer hold poison, as the hardware's hold garbage."""
    if offset or post or distribution not in (_NORMAL_LOAD, _BROADCAST_LOAD):
        raise UnsupportedOperation(f"vector load with mode {(offset, distribution, post)}")
    if distribution == _BROADCAST_LOAD:
        return np.repeat(pointer.memory.read(lanes_view(pointer, 1)), LANES)
    return with_poison(pointer.memory.read(lanes_view(pointer, min(LANES, pointer.count))), LANES)


def with_poison(values: np.ndarray, size: int) -> np.ndarray:
    poison = np.full((size - values.size) * values.itemsize, 0xA5, np.uint8)
    return np.concatenate([values, poison.view(values.dtype)])


def store_lanes(
    vector: np.ndarray, pointer: View, offset: int, distribution: int, post: int, mask: np.ndarray
) -> None:
    if offset or post or distribution not in (_NORMAL_STORE, _FIRST_LANE_STORE):
        raise UnsupportedOperation(f"vector store with mode {(offset, distribution, post)}")
    if distribution == _FIRST_LANE_STORE:
        mask = np.arange(LANES) < 1
    store_masked(lanes_view(pointer, LANES), vector, mask)


def store_masked(view: View, vector: np.ndarray, mask: np.ndarray) -> None:
    mask = lanes_of(mask)
    active = int(mask.sum())
    if not mask[:active].all():
        raise UnsupportedOperation("a vector store with a scattered mask")
    view.memory.write(lanes_view(view, active), vector[:active])


def store_predicate(mask: np.ndarray, pointer: View, align: bytes) -> tuple[bytes, View]:
    """64 predicate bits to UB, packed; the returned pair continues an unaligned stream."""
    packed = np.packbits(lanes_of(mask), bitorder="little")
    pointer.memory.write(lanes_view(pointer, LANES // 8), packed)
    return align, advance(pointer, LANES // 8)


def load_predicate(pointer: View, offset: int, distribution: int, post: int) -> np.ndarray:
    """256 packed predicate bits; those past the end of the buffer are on, as poison."""
    if offset or distribution or post:
        raise UnsupportedOperation(f"predicate load with mode {(offset, distribution, post)}")
    size = min(LANES // 2, pointer.count)
    bits = np.unpackbits(pointer.memory.read(lanes_view(pointer, size)), bitorder="little")
    return np.concatenate([bits.astype(bool), np.ones(4 * LANES - bits.size, bool)])


def store_predicate_bits(mask: np.ndarray, pointer: View, offset: int, distribution: int,
                         post: int) -> None:  # fmt: skip
    """256 predicate bits to UB, packed, as many of them as the buffer holds."""
    if offset or distribution or post or mask.size != 4 * LANES:
        raise UnsupportedOperation(f"predicate store with mode {(offset, distribution, post)}")
    size = min(LANES // 2, pointer.count)
    packed = np.packbits(mask, bitorder="little")[:size]
    pointer.memory.write(lanes_view(pointer, size), packed)


def load_unaligned(pointer: View, align: bytes, post: int) -> tuple[np.ndarray, bytes, View]:
    """64 lanes from any address; of packed predicates the first 64 bits."""
    if post:
        raise UnsupportedOperation(f"unaligned vector load with post update {post}")
    if pointer.itemsize > 1:
        return load_lanes(pointer, 0, _NORMAL_LOAD, 0), align, pointer
    packed = pointer.memory.read(lanes_view(pointer, min(LANES // 8, pointer.count)))
    return with_poison(packed, 4 * LANES).view(np.int32), align, pointer


def predicate_of_vector(vector: np.ndarray, part: int) -> np.ndarray:
    """64 packed bits of a vector as a predicate on 64 lanes."""
    packed = vector.view(np.uint8)[8 * part : 8 * part + 8]
    return np.unpackbits(packed, bitorder="little").astype(bool)


def store_unaligned(vector: np.ndarray, pointer: View, size: int, align: bytes
                    ) -> tuple[bytes, View]:  # fmt: skip
    """The first `size` bytes of a vector to any address."""
    lanes = size // pointer.itemsize
    pointer.memory.write(lanes_view(pointer, lanes), vector[:lanes])
    return align, advance(pointer, lanes)


def gather(pointer: View, indices: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask = lanes_of(mask)
    used = indices[mask]
    result = np.zeros(LANES, np.int32)
    low, high = int(used.min()), int(used.max())
    words = View(pointer.memory, np.dtype(np.int32), pointer.base, pointer.offset + low,
                 (high - low + 1,), (1,))  # fmt: skip
    result[mask] = pointer.memory.read(words)[used - low]
    return result.view(np.float32)


def _masked(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """An operation whose inactive lanes become zero."""

    def masked(*operands: Any) -> np.ndarray:
        *values, mask = operands
        with np.errstate(all="ignore"):
            first = np.asarray(values[0])
            rest = [np.asarray(v).astype(first.dtype) for v in values[1:]]
            result = np.asarray(function(first, *rest))
        active = mask if mask.size == result.size else lanes_of(mask)
        return np.where(active, result, np.zeros_like(result))

    return masked


def _first_lane(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """A reduction: its result stands in lane 0."""

    def reduced(vector: np.ndarray, mask: np.ndarray) -> np.ndarray:
        result = np.zeros_like(vector)
        with np.errstate(over="ignore"):
            result[0] = function(vector[lanes_of(mask)])
        return result

    return reduced


def _on_predicates(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def combined(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first, second, active = same_size(a, b, mask)
        return np.asarray(function(first, second) & active)

    return combined


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "pge.b32": predicate,
    "pge.b8": predicate_bits,
    "pintlv.b8": interleave,
    "plds.b8": load_predicate,
    "vldsx1.v64s32": load_lanes,
    "vldsx1.v64f32": load_lanes,
    "vstsx1.v64s32": store_lanes,
    "vstsx1.v64f32": store_lanes,
    "vgather2_v300.v64f32": gather,
    "init.vector.align.data": lambda: b"",
    "pstu.b32": store_predicate,
    "psts.b8": store_predicate_bits,
    "vldas": lambda pointer: b"",
    "vldus.post.s32": load_unaligned,
    "vstus.post.s32": store_unaligned,
    "movvp": predicate_of_vector,
    "vstas": lambda align, pointer, offset, post: None,  # the flush of a stream already written
    "vbr": lambda value: np.full(LANES, value, np.int32),
    "vbr i8": lambda value: np.full(4 * LANES, value, np.int8),
    "vbr f32": lambda value: np.full(LANES, value, np.float32),
    "vdups.z": lambda value, mask, _: np.where(lanes_of(mask), np.int32(value), np.int32(0)),
    "vdups.z f32": lambda value, mask, _: np.where(lanes_of(mask), np.float32(value), 0).astype(
        np.float32
    ),
    "vci": lambda first, order: np.arange(first, first + LANES, dtype=np.int32),
    "vsel": lambda yes, no, mask: np.where(lanes_of(mask), yes, no),
    "vcadd.s.x": _first_lane(lambda v: v.sum(dtype=np.int32)),
    "vcmin.s.x": _first_lane(np.min),
    "vcmax.s.x": _first_lane(np.max),
    "vnot.x": _masked(np.invert),
    "pnot.z": lambda a, mask: ~lanes_of(a) & lanes_of(mask),
}
for _kind, _function in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
}.items():  # fmt: skip
    _OPERATIONS[f"v{_kind}.s.x"] = _OPERATIONS[f"v{_kind}s.s.x"] = _masked(_function)
for _kind, _function in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
    _OPERATIONS[f"v{_kind}.x"] = _masked(_function)
    _OPERATIONS[f"p{_kind}.z"] = _on_predicates(_function)
for _kind, _function in {"shr": np.right_shift, "shl": np.left_shift}.items():
    _OPERATIONS[f"v{_kind}s.s.x"] = _OPERATIONS[f"v{_kind}.s.x"] = _masked(_function)
_OPERATIONS["vshls.u.x"] = _masked(np.left_shift)  # the same bits whatever the sign
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
for _kind, _function in COMPARE.items():
    _OPERATIONS[f"vcmp.{_kind}.s.z"] = _OPERATIONS[f"vcmps.{_kind}.s.z"] = _masked(_function)


def find(name: str, result: str) -> Callable[..., Any]:
    """The intrinsic of that name; `result` is the text of its result type."""
    short = name.removeprefix("hivm_regbaseintrins.intr.hivm.")
    if f"{short} f32" in _OPERATIONS and result.endswith("xf32>"):
        short += " f32"
    elif f"{short} i8" in _OPERATIONS and result.endswith("xi8>"):
        short += " i8"
    if short not in _OPERATIONS:
        raise UnsupportedOperation(f"vector intrinsic {name}")
    return _OPERATIONS[short]


def pointer(view: View) -> View:
    """The start of a memref's buffer, with what is left of it as size; bools count in bytes."""
    if view.dtype is None:
        size = (view.offset + view.count + 7) // 8
        return View(view.memory, np.dtype(np.uint8), view.base, 0, (size,), (1,))
    return View(view.memory, view.dtype, view.base, 0, (view.offset + view.count,), (1,))


def advance(at: View, by: int) -> View:
    left = max(at.count - by, 0)
    return View(at.memory, at.dtype, at.base, at.offset + by, (left,), (1,))
