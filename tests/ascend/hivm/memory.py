"""Unified buffer and global memory as the executed program sees them, with every access checked.

A `View` is a memref: a buffer, an element type, a byte address and sizes with strides. Buffers
know nothing of operations; they answer `read`, `write`, `load` and `store` or raise a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK = 32  # bytes: the unit in which transfers touch UB
LINE = 64  # bytes: a scalar store to GM goes through a cache that writes whole lines back


class HivmFault(Exception):
    """A program did what it must not do. `where` is filled in by the executor."""

    where: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}{self.where}"


class OutOfBounds(HivmFault):
    """An access outside a GM argument, outside UB, or outside a memref's own size."""


class Race(HivmFault):
    """Two programs of one launch touched the same GM byte and one of them wrote it."""


class UninitialisedRead(HivmFault):
    """A UB byte was read that this program had not written."""


class FlagImbalance(HivmFault):
    """A wait without its set (the core hangs) or a set that is never waited for."""


class UnsupportedOperation(HivmFault):
    """An operation that the executor does not know; it never guesses."""


@dataclass(slots=True, eq=False)
class View:
    """A memref value. `base` and `offset` are in bytes and elements; sizes outer first."""

    memory: Any
    dtype: np.dtype | None  # None: i1, bit-packed as the vector unit keeps it
    base: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize if self.dtype is not None else 1

    @property
    def count(self) -> int:
        count = 1
        for size in self.sizes:
            count *= max(size, 0)
        return count

    @property
    def nbytes(self) -> int:
        return (self.count + 7) // 8 if self.dtype is None else self.count * self.itemsize

    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte that the view touches."""
        if self.dtype is None:
            if self.offset % 8 or not self.is_contiguous:
                raise UnsupportedOperation(f"a strided view of packed bools: {self}")
            first = self.base + self.offset // 8
            return first, first + self.nbytes
        last = sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        first = self.base + self.offset * self.itemsize
        return first, first + (last + 1) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    def at(self, indices: tuple[int, ...]) -> int:
        """Byte address of one element; OutOfBounds outside the view's own sizes."""
        element = self.offset
        for index, size, step in zip(indices, self.sizes, self.strides, strict=True):
            if not 0 <= index < size:
                raise OutOfBounds(f"index {indices} outside a memref of sizes {self.sizes}")
            element += index * step
        return self.base + element * self.itemsize


@dataclass
class Memory:
    """Bytes with an initialised flag each: UB, or scratch that a core keeps in registers."""

    name: str
    data: np.ndarray
    initialised: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.initialised = np.zeros(len(self.data), np.uint8)

    def clear(self) -> None:
        """A fresh program: nothing in UB counts as written, and what is there is poison."""
        self.data[:] = 0xA5
        self.initialised[:] = 0

    def note_read(self, first: int, last: int) -> None:
        if not self.initialised[first:last].all():
            raise UninitialisedRead(f"{self.name}[{first}:{last}] read before it was written")

    def note_write(self, first: int, last: int) -> None:
        self.initialised[first:last] = 1

    def check(self, first: int, last: int) -> None:
        if first < 0 or last > len(self.data):
            raise OutOfBounds(
                f"{self.name}: bytes [{first}, {last}) outside its {len(self.data)} bytes"
            )

    def read(self, view: View) -> np.ndarray:
        """The view's elements, a copy, in the view's shape."""
        if view.count == 0:
            return np.zeros(view.sizes, view.dtype if view.dtype is not None else bool)
        first, last = view.span()
        self.check(first, last)
        if view.dtype is None:
            self.note_read(first, last)
            bits = np.unpackbits(self.data[first:last], bitorder="little")
            return bits[: view.count].astype(bool).reshape(view.sizes)
        if view.is_contiguous:
            self.note_read(first, last)
            return self.data[first:last].view(view.dtype).reshape(view.sizes).copy()
        for row_first, row_last in _rows(view):
            self.note_read(row_first, row_last)
        return self._strided(view).copy()

    def write(self, view: View, values: np.ndarray) -> None:
        """Writes values, broadcast to the view's shape."""
        if view.count == 0:
            return
        first, last = view.span()
        self.check(first, last)
        if view.dtype is None:
            self.note_write(first, last)
            bits = np.broadcast_to(np.asarray(values, bool), view.sizes).reshape(-1)
            self.data[first:last] = np.packbits(bits, bitorder="little")
        elif view.is_contiguous:
            self.note_write(first, last)
            self.data[first:last].view(view.dtype).reshape(view.sizes)[...] = values
        else:
            for row_first, row_last in _rows(view):
                self.note_write(row_first, row_last)
            self._strided(view)[...] = values

    def load(self, view: View, indices: tuple[int, ...]) -> Any:
        """One element as a Python number."""
        if view.dtype is None:
            raise UnsupportedOperation("a scalar load from packed bools")
        first = view.at(indices)
        last = first + view.itemsize
        self.check(first, last)
        self.note_read(first, last)
        return self.data[first:last].view(view.dtype)[0].item()

    def store(self, view: View, indices: tuple[int, ...], value: Any) -> None:
        if view.dtype is None:
            raise UnsupportedOperation("a scalar store to packed bools")
        first = view.at(indices)
        last = first + view.itemsize
        self.check(first, last)
        self.note_write(first, last)
        self.data[first:last].view(view.dtype)[0] = value

    def _strided(self, view: View) -> np.ndarray:
        steps = tuple(step * view.itemsize for step in view.strides)
        start = view.base + view.offset * view.itemsize
        return np.ndarray(view.sizes, view.dtype, self.data.data, start, steps)


def _rows(view: View) -> list[tuple[int, int]]:
    """Byte ranges of the innermost rows of a view, so that gaps between rows stay untouched."""
    size, step = view.sizes[-1], view.strides[-1]
    length = ((size - 1) * step + 1) * view.itemsize
    starts = np.zeros(1, np.int64)
    for outer, stride in zip(view.sizes[:-1], view.strides[:-1], strict=True):
        starts = (starts[:, None] + np.arange(outer) * stride).reshape(-1)
    first = view.base + (view.offset + starts) * view.itemsize
    return [(int(at), int(at) + length) for at in first]


class GlobalBuffer(Memory):
    """One GM argument. Remembers which program wrote and read each byte of this launch."""

    NOBODY, SEVERAL, ATOMIC = -1, -2, -3

    def __init__(self, name: str, data: np.ndarray, address: int) -> None:
        super().__init__(name, data)
        self.address = address
        self.initialised[:] = 1
        self.program = 0
        self.writer = np.full(len(data), self.NOBODY, np.int32)
        self.reader = np.full(len(data), self.NOBODY, np.int32)

    def note_read(self, first: int, last: int) -> None:
        writer = self.writer[first:last]
        foreign = (writer != self.NOBODY) & (writer != self.program)
        if foreign.any():
            self._race("read", first + int(np.argmax(foreign)), writer[foreign][0])
        reader = self.reader[first:last]
        reader[:] = np.where(
            (reader == self.NOBODY) | (reader == self.program), self.program, self.SEVERAL
        )

    def note_write(self, first: int, last: int) -> None:
        writer, reader = self.writer[first:last], self.reader[first:last]
        foreign = (writer != self.NOBODY) & (writer != self.program)
        if foreign.any():
            self._race("wrote", first + int(np.argmax(foreign)), writer[foreign][0])
        foreign = (reader != self.NOBODY) & (reader != self.program)
        if foreign.any():
            self._race("wrote", first + int(np.argmax(foreign)), reader[foreign][0])
        writer[:] = self.program

    def store(self, view: View, indices: tuple[int, ...], value: Any) -> None:
        """A scalar store: its whole cache line is written back, so the line must be ours."""
        super().store(view, indices, value)
        first = view.at(indices) // LINE * LINE
        self.note_write(first, min(first + LINE, len(self.data)))

    def add(self, view: View, values: np.ndarray) -> None:
        """An atomic add: commutes with other atomic adds, races with everything else."""
        first, last = view.span()
        self.check(first, last)
        writer, reader = self.writer[first:last], self.reader[first:last]
        if ((writer != self.NOBODY) & (writer != self.ATOMIC)).any() or (
            reader != self.NOBODY
        ).any():
            self._race("atomically added to", first, self.SEVERAL)
        writer[:] = self.ATOMIC
        self._strided(view)[...] += np.asarray(values, view.dtype)

    def _race(self, verb: str, byte: int, other: Any) -> None:
        names = {self.SEVERAL: "several programs", self.ATOMIC: "an atomic"}
        who = names.get(int(other), f"program {int(other)}")
        raise Race(f"program {self.program} {verb} byte {byte} of {self.name}, which {who} used")
