"""Unified buffer and global memory as the executed program sees them, with every access checked.

A `View` is a memref: a buffer, an element type, a byte address and sizes with strides. Buffers
know nothing of operations; they answer `read`, `write`, `load` and `store` or raise a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import pack_into, unpack_from
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


class Memory:
    """Bytes with an initialised flag each: UB, or scratch that a core keeps in registers."""

    def __init__(self, name: str, content: bytearray) -> None:
        self.name = name
        self.raw = content
        self.data = np.frombuffer(content, np.uint8)  # the same bytes, writable
        self.watch: Callable[[Memory, int, int, bool], None] | None = None
        self.written = bytearray(len(content))
        self.initialised = np.frombuffer(self.written, np.uint8)

    def clear(self) -> None:
        """A fresh program: nothing in UB counts as written, and what is there is poison."""
        self.data[:] = 0xA5
        self.initialised[:] = 0

    def note_read(self, first: int, last: int) -> None:
        if self.watch is not None:
            self.watch(self, first, last, False)
        if 0 in self.written[first:last]:
            raise UninitialisedRead(f"{self.name}[{first}:{last}] read before it was written")

    def note_write(self, first: int, last: int) -> None:
        if self.watch is not None:
            self.watch(self, first, last, True)
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
        return unpack_from(view.dtype.char, self.raw, first)[0]

    def store(self, view: View, indices: tuple[int, ...], value: Any) -> None:
        if view.dtype is None:
            raise UnsupportedOperation("a scalar store to packed bools")
        first = view.at(indices)
        last = first + view.itemsize
        self.check(first, last)
        self.note_write(first, last)
        pack_into(view.dtype.char, self.raw, first, value)

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
    """One GM argument. Remembers which program wrote and read each word of this launch.

    A word is 4 bytes; 1 in a buffer of narrower elements.
    """

    NOBODY, SEVERAL, ATOMIC = -1, -2, -3

    def __init__(self, name: str, content: bytearray, itemsize: int, address: int) -> None:
        super().__init__(name, content)
        self.address = address
        self.program = 0
        self.word = 4 if itemsize >= 4 else 1
        words = len(content) // self.word
        self.writer = np.full(words, self.NOBODY, np.int32)
        self.reader = np.full(words, self.NOBODY, np.int32)
        self._writers, self._readers = memoryview(self.writer), memoryview(self.reader)

    def _words(self, first: int, last: int) -> range:
        return range(first // self.word, -(-last // self.word))

    def note_read(self, first: int, last: int) -> None:
        if self.watch is not None:
            self.watch(self, first, last, False)
        words = self._words(first, last)
        if len(words) <= 2:  # a scalar: the common case, without NumPy
            for word in words:
                self._require(self._writers[word], "read", word)
                if self._readers[word] != self.program:
                    unread = self._readers[word] == self.NOBODY
                    self._readers[word] = self.program if unread else self.SEVERAL
            return
        self._require_all(self.writer, "read", words)
        reader = self.reader[words.start : words.stop]
        ours = (reader == self.NOBODY) | (reader == self.program)
        reader[:] = np.where(ours, self.program, self.SEVERAL)

    def note_write(self, first: int, last: int) -> None:
        if self.watch is not None:
            self.watch(self, first, last, True)
        words = self._words(first, last)
        self._require_all(self.writer, "wrote", words)
        self._require_all(self.reader, "wrote", words)
        self.writer[words.start : words.stop] = self.program

    def _require(self, user: int, verb: str, word: int) -> None:
        """That nobody else used a word so far."""
        if user not in (self.NOBODY, self.program):
            names = {self.SEVERAL: "several programs", self.ATOMIC: "an atomic"}
            who = names.get(user, f"program {user}")
            raise Race(
                f"program {self.program} {verb} byte {word * self.word} of {self.name}, "
                f"which {who} used"
            )

    def _require_all(self, users: np.ndarray, verb: str, words: range) -> None:
        part = users[words.start : words.stop]
        foreign = (part != self.NOBODY) & (part != self.program)
        if foreign.any():
            at = int(np.argmax(foreign))
            self._require(int(part[at]), verb, words.start + at)

    def store(self, view: View, indices: tuple[int, ...], value: Any) -> None:
        """A scalar store: its whole cache line is written back, so the line must be ours."""
        super().store(view, indices, value)
        first = view.at(indices) // LINE * LINE
        self.note_write(first, min(first + LINE, len(self.data)))

    def add(self, view: View, values: np.ndarray) -> None:
        """An atomic add: commutes with other atomic adds, races with everything else."""
        first, last = view.span()
        self.check(first, last)
        if self.watch is not None:
            self.watch(self, first, last, True)
        words = self._words(first, last)
        writer = self.writer[words.start : words.stop]
        plain = (writer != self.NOBODY) & (writer != self.ATOMIC)
        for users in (writer[plain], self.reader[words.start : words.stop]):
            used = users[users != self.NOBODY]
            if used.size:
                raise Race(
                    f"program {self.program} atomically added to bytes [{first}, {last}) of "
                    f"{self.name}, which others access plainly"
                )
        writer[:] = self.ATOMIC
        self._strided(view)[...] += np.asarray(values, view.dtype)
