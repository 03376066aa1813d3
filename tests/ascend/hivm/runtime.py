"""What a translated program calls while it runs: its counts, flags and numeric modes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np

from .counts import Counts
from .memory import (
    FlagImbalance,
    GlobalBuffer,
    Memory,
    OutOfBounds,
    UnsupportedOperation,
    View,
)
from .modes import Modes
from .order import Recorder

DTYPES = {
    "i8": np.dtype(np.int8), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64), "f32": np.dtype(np.float32), "i1": None,
    "f16": np.dtype(np.float16),
}  # fmt: skip


class Runtime:
    """State of the program that runs now. One object a launch, reset for each program."""

    def __init__(self, ub_bytes: int, modes: Modes, recorder: Recorder | None = None) -> None:
        self.ub = Memory("UB", bytearray(ub_bytes))
        self.recorder = recorder
        if recorder is not None:
            self.ub.watch = recorder.access
        self.modes = modes
        self.buffers: list[GlobalBuffer] = []
        self.block = 0
        self.reset(0)

    def reset(self, block: int) -> None:
        self.block = block
        self.counts = Counts()
        self.flags: Counter[tuple[str, str, int]] = Counter()
        self.ub.clear()
        if self.recorder is not None:
            self.recorder.start_program()

    def set_flag(self, source: str, target: str, event: int, line: int) -> None:
        self.flags[source, target, event] += 1
        if self.recorder is not None:
            self.recorder.act("set", (source, target, event), line)

    def wait_flag(self, source: str, target: str, event: int, line: int) -> None:
        self.flags[source, target, event] -= 1
        if self.recorder is not None:
            self.recorder.act("wait", (source, target, event), line)
        if self.flags[source, target, event] < 0:
            raise FlagImbalance(f"wait for {source} -> {target} event {event} that nobody set")

    def finish(self) -> None:
        left = [key for key, count in self.flags.items() if count]
        if left:
            raise FlagImbalance(f"flags set and never waited for: {left}")

    def ub_view(self, address: int, dtype: str, sizes: tuple[int, ...]) -> View:
        return View(self.ub, DTYPES[dtype], address, 0, sizes, dense_strides(sizes))

    def gm_view(self, address: int, dtype: str) -> View:
        """A pointer that the kernel read from memory: must lie in a buffer of the launch."""
        for buffer in self.buffers:
            offset = address - buffer.address
            if 0 <= offset < len(buffer.data):
                kind = DTYPES[dtype]
                assert kind is not None
                count = (len(buffer.data) - offset) // kind.itemsize
                return View(buffer, kind, offset, 0, (count,), (1,))
        raise OutOfBounds(f"pointer {address:#x} to no buffer of this launch")

    def stack_view(self, dtype: str, sizes: tuple[int, ...]) -> View:
        kind = DTYPES[dtype]
        assert kind is not None
        scratch = Memory("stack", bytearray(kind.itemsize * int(np.prod(sizes))))
        return View(scratch, kind, 0, 0, sizes, dense_strides(sizes))

    def load(self, view: View, *indices: int) -> int | float:
        if view.memory is not self.ub and view.memory.name != "stack":
            self.counts.gm_scalar_loads += 1
        return view.memory.load(view, indices)  # type: ignore[no-any-return]

    def store(self, value: int | float, view: View, *indices: int) -> None:
        if view.memory is not self.ub and view.memory.name != "stack":
            self.counts.gm_scalar_stores += 1
        view.memory.store(view, indices, value)


def dense_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def reinterpret(view: View, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> View:
    """memref.reinterpret_cast: offset counts from the buffer's base, not from the view."""
    return View(view.memory, view.dtype, view.base, offset, sizes, strides)


def subview(view: View, offsets: tuple[int, ...], sizes: tuple[int, ...],
            steps: tuple[int, ...], dropped: int) -> View:  # fmt: skip
    """memref.subview; `dropped` dimensions of size one vanish from the result."""
    offset = view.offset
    for first, size, step, length, stride in zip(
        offsets, sizes, steps, view.sizes, view.strides, strict=True
    ):
        if size > 0 and (first < 0 or first + (size - 1) * step >= length):
            raise OutOfBounds(f"subview [{first}, {first + size}) of a memref of size {length}")
        offset += first * stride
    dims = [(size, a * b) for size, a, b in zip(sizes, view.strides, steps, strict=True)]
    while dropped:
        ones = [at for at, (size, _) in enumerate(dims) if size == 1]
        # a leading run of ones is an index into rows, a trailing one a column vector's
        dims.pop(ones[0] if ones[0] == 0 else ones[-1])
        dropped -= 1
    return View(view.memory, view.dtype, view.base, offset,
                tuple(d[0] for d in dims), tuple(d[1] for d in dims))  # fmt: skip


def expand(view: View, sizes: tuple[int, ...]) -> View:
    """memref.expand_shape, of elements that lie one behind the other."""
    if not view.is_contiguous or prod(sizes) != view.count:
        raise UnsupportedOperation(f"a view of {sizes} of {view}")
    strides = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    return View(view.memory, view.dtype, view.base, view.offset, sizes, strides)


def reshape(view: View, groups: list[list[int]]) -> View:
    """memref.collapse_shape: each group of dimensions becomes one."""
    sizes, strides = [], []
    for group in groups:
        size = 1
        for dim in group:
            size *= view.sizes[dim]
        for outer, inner in pairwise(group):
            if view.sizes[outer] != 1 and view.strides[outer] != (
                view.strides[inner] * view.sizes[inner]
            ):
                raise OutOfBounds(f"collapse_shape of strided rows: {view.sizes} {view.strides}")
        sizes.append(size)
        strides.append(view.strides[group[-1]] if group else 1)
    return View(view.memory, view.dtype, view.base, view.offset, tuple(sizes), tuple(strides))


def bitcast(view: View, dtype: str) -> View:
    return View(view.memory, DTYPES[dtype], view.base, view.offset, view.sizes, view.strides)


def wrap(value: int, bits: int) -> int:
    """Two's complement; i1 is 0 or 1."""
    if bits == 1:
        return value & 1
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


def divide(a: int, b: int) -> int:
    """Integer division toward zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def remainder(a: int, b: int) -> int:
    return a - divide(a, b) * b
