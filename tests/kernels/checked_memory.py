"""Triton's interpreter with memory that is watched: bounds, races between programs, any order.

The interpreter itself dereferences whatever address a kernel computes, and runs the programs of a
launch one after the other in one order, so it hides wild accesses and missing barriers alike.
Inside `with CheckedMemory(seed)` every load, store and atomic of every launch is checked:

- each address lies in a tensor that the launch was given (and, for tables that a kernel reaches
  through addresses in memory, in one that was lent), outside everything forbidden;
- no address is written by two programs with different values, or twice in one program;
- programs run in a random order, and one that reads what another program of the launch has already
  written gets garbage: kernels may read such cells (they do, where that saves waiting for an
  answer) but must not let the value count;
- atomics are exempt among themselves, not against plain accesses of other programs;
- what a program did before an atomic comes before what others do after their later atomic on the
  same word, as on a GPU (acquire and release, Triton's default); nothing else orders programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import getcallargs
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fused_slots.backends.ascend.operations import AscendOperations
from fused_slots.backends.base import Step
from fused_slots.backends.gpu import GpuBackend

Runs = list[tuple[int, int]]
"""Half-open ranges of addresses."""

GARBAGE = (0, 1, -1, 77, -2_000_000_011, 2_000_000_011)
"""What a program reads where another one of its launch has written."""

WORD = 4
"""Bytes; the smallest element of these kernels."""

REPORTED = 4
"""Addresses that an error names."""


class AccessError(AssertionError):
    """A kernel accessed memory that it must not touch, or two programs raced."""


NOBODY, SEVERAL = 0, -1
"""Who touched a word: a stretch of a program (numbered from 1 on), or one of these."""


class _Order:
    """Which stretches of programs come before the running one.

    A stretch is what a program does between two of its atomics.
    """

    def __init__(self) -> None:
        self.now = NOBODY
        self._mine = np.zeros(2, dtype=bool)
        self._released: dict[int, set[int]] = {}

    def begin_program(self) -> None:
        self._start(set())

    def foreign(self, who: np.ndarray) -> np.ndarray:
        """Where a stretch was that does not come before this one (nor is it)."""
        return ~self._mine[who]

    def synchronize(self, words: np.ndarray, acquire_release: bool) -> None:
        """An atomic on these words: acquire what was released there, release, begin anew."""
        before = {*np.flatnonzero(self._mine).tolist()}
        for word in set(words.tolist()) if acquire_release else ():
            before |= self._released.get(word, set())
            self._released[word] = set(before)
        self._start(before)

    def _start(self, before: set[int]) -> None:
        self.now += 1
        # One more than the stretches, and False: SEVERAL is its index.
        self._mine = np.zeros(self.now + 2, dtype=bool)
        self._mine[[NOBODY, self.now, *before]] = True


class _Shadow:
    """What one launch did to each 4-byte word of the memory that it may touch."""

    def __init__(self, ranges: Runs) -> None:
        self.low = np.array([low for low, _ in ranges], dtype=np.uint64)
        self.high = np.array([high for _, high in ranges], dtype=np.uint64)
        sizes = [-(-(high - low) // WORD) for low, high in ranges]
        self._first = np.cumsum([0, *sizes])[:-1].astype(np.int64)
        total = sum(sizes)
        self.writers = np.zeros(total, dtype=np.int32)
        self.readers = np.zeros(total, dtype=np.int32)
        self.counted = np.zeros(total, dtype=bool)
        self.counters: dict[int, set[int]] = {}
        self.values = np.zeros(total, dtype=np.int64)

    def words(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Each address's word, and whether its element lies within one range."""
        if not len(self.low):
            return np.zeros(len(addresses), np.int64), np.zeros(len(addresses), dtype=bool)
        ranges = np.searchsorted(self.low, addresses, side="right") - 1
        inside = (ranges >= 0) & (addresses + np.uint64(size) <= self.high[ranges])
        offsets = (addresses - self.low[ranges]).astype(np.int64) // WORD
        return self._first[ranges] + offsets, inside


class CheckedMemory:
    """A context in which interpreted launches are checked.

    Args:
        seed: of the order in which a launch's programs run; None = Triton's own order.

    Attributes:
        launches: launches checked so far.
        accesses: addresses checked so far, by kind.
        garbage: reads that got garbage.
    """

    def __init__(self, seed: int | None = 0) -> None:
        self.launches = 0
        self.accesses = {"load": 0, "store": 0, "atomic": 0}
        self.garbage = 0
        self.shuffle(seed)
        self._forbidden: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._stack = ExitStack()
        self._order = _Order()
        self._shadow = _Shadow([])

    def shuffle(self, seed: int | None) -> None:
        """Run each launch's programs in an order that follows from the seed; None: in Triton's."""
        self._rng = Random(seed or 0)
        self._shuffled = seed is not None

    def forbid(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make parts of tensors, such as guard bands, off limits to reads and writes."""
        self._forbidden += tensors

    @contextmanager
    def lend(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Tensors that kernels may reach through addresses in memory."""
        self._lent += tensors
        yield
        del self._lent[len(self._lent) - len(tensors) :]

    def __enter__(self) -> CheckedMemory:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        patches: list[tuple[Any, str, Any]] = [
            (builder, "create_masked_load", self._loading(builder.create_masked_load)),
            (builder, "create_masked_store", self._storing(builder.create_masked_store)),
            (builder, "create_atomic_rmw", self._counting(builder.create_atomic_rmw)),
            (builder, "create_atomic_cas", _refused),
            (executor, "__call__", self._launching()),
            *(
                (owner, "step", self._lending(owner.step))
                for owner in (GpuBackend, AscendOperations)
            ),
            *_quicker(),
        ]
        self._stack.enter_context(warnings.catch_warnings())
        # The interpreter takes the index of a one-element array, which NumPy will forbid.
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        for owner, name, replacement in patches:
            self._stack.enter_context(mock.patch.object(owner, name, replacement))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # What a launch does

    def _launching(self) -> Callable[..., None]:
        def call(executor: Any, *values: Any, **constants: Any) -> None:
            self._begin([v for v in values if isinstance(v, torch.Tensor)])
            _patch_language(executor.fn)
            named = getcallargs(executor.fn, *values, **constants)
            arguments = {
                name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in named.items()
            }
            grid = (*executor.grid, 1, 1)[:3]
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(*grid)
            programs = list(product(*map(range, grid)))
            if self._shuffled:
                self._rng.shuffle(programs)
            for place in programs:
                self._order.begin_program()
                builder.set_grid_idx(*place)
                executor.fn(**arguments)

        return call

    def _begin(self, tensors: Sequence[torch.Tensor]) -> None:
        self.launches += 1
        allowed = [run for tensor in [*tensors, *self._lent] for run in _runs(tensor)]
        banned = [run for tensor in self._forbidden for run in _runs(tensor)]
        self._order = _Order()
        self._shadow = _Shadow(_without(_merged(allowed), _merged(banned)))

    def _check(self, kind: str, pointers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The words of the lanes that are on, all of them in bounds; and the lanes."""
        lanes = np.flatnonzero(np.broadcast_to(mask.data, pointers.data.shape))
        addresses = pointers.data.ravel()[lanes]
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        words, inside = self._shadow.words(addresses, size)
        self._refuse(f"a {kind} outside every tensor of the launch", ~inside, addresses)
        self.accesses[kind] += len(addresses)
        return words, lanes

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            words, lanes = self._check("load", pointers, mask)
            result = load(builder, pointers, mask, *rest)
            shadow = self._shadow
            self._refuse_counted("read", words)
            shadow.readers[words] = np.where(
                self._order.foreign(shadow.readers[words]), SEVERAL, self._order.now
            )
            foreign = lanes[self._order.foreign(shadow.writers[words])]
            if len(foreign):
                self.garbage += len(foreign)
                result.data.reshape(-1)[foreign] = self._rng.choice(GARBAGE)
            return result

        return checked

    def _storing(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            words, lanes = self._check("store", pointers, mask)
            shadow = self._shadow
            values = np.broadcast_to(value.data, pointers.data.shape).ravel()[lanes]
            other = self._order.foreign(shadow.writers[words])
            clash = other & (shadow.values[words] != values)
            shadow.values[words] = values
            clash |= shadow.values[words] != values
            self._refuse("two stores of different values to one address", clash, words)
            self._refuse_counted("stored", words)
            shadow.writers[words] = np.where(other, SEVERAL, self._order.now)
            return store(builder, pointers, value, mask, *rest)

        return checked

    def _counting(self, rmw: Callable[..., Any]) -> Callable[..., Any]:
        relaxed = interpreter._ir.MEM_SEMANTIC.RELAXED

        def checked(
            builder: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
        ) -> Any:
            words, _ = self._check("atomic", pointers, mask)
            shadow = self._shadow
            if len(words):
                for touched, what in ((shadow.readers, "read"), (shadow.writers, "stored")):
                    plain = self._order.foreign(touched[words])
                    self._refuse(f"{what} by one program and counted by another", plain, words)
                shadow.counted[words] = True
                for word in words.tolist():
                    shadow.counters.setdefault(word, set()).add(self._order.now)
                self._order.synchronize(words, sem != relaxed)
            return rmw(builder, op, pointers, value, mask, sem, scope)

        return checked

    def _refuse_counted(self, what: str, words: np.ndarray) -> None:
        """Refuse a plain access to what another program counts up, at the same time or later."""
        for word in words[self._shadow.counted[words]].tolist():
            who = np.array([*self._shadow.counters[word]], dtype=np.int32)
            foreign = self._order.foreign(who)
            self._refuse(f"{what} by one program and counted by another", foreign, who * 0 + word)

    def _lending(self, run: Callable[..., None]) -> Callable[..., None]:
        def lent(backend: Any, step: Step) -> None:
            with self.lend(step.tables_out or ()):
                run(backend, step)

        return lent

    def _refuse(self, what: str, wrong: np.ndarray, places: np.ndarray) -> None:
        if wrong.any():
            named = ", ".join(f"{place:#x}" for place in places[wrong][:REPORTED].tolist())
            raise AccessError(f"{what}: {wrong.sum()} places, {named}")


def _refused(*_: object) -> None:
    raise AccessError("compare-and-swap is not watched")


def _runs(tensor: torch.Tensor) -> Runs:
    """The ranges of addresses that a tensor's elements fill."""
    if not tensor.numel():
        return []
    size = tensor.element_size()
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size)]
    return [run for part in tensor for run in _runs(part)]


def _merged(runs: Runs) -> Runs:
    """Sorted, and overlapping ranges made one; neighbours stay apart."""
    merged: Runs = []
    for low, high in sorted(runs):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _without(runs: Runs, banned: Runs) -> Runs:
    """What is left of ranges when others are taken out."""
    left: Runs = []
    for low, high in runs:
        for begin, end in banned:
            if end <= low or begin >= high:
                continue
            if begin > low:
                left.append((low, begin))
            low = max(low, end)
        if low < high:
            left.append((low, high))
    return left


_patched_modules: set[str] = set()


def _patch_language(function: Any) -> None:
    """Put interpreted functions into triton.language, once a module and for good.

    Triton does so for every launch and every call of a device function, which takes a third of
    the time; a process that interprets kernels does nothing else with the language.
    """
    module = function.__module__
    if module not in _patched_modules:
        _patched_modules.add(module)
        _original_patch(function)


_original_patch = interpreter._patch_lang
_original_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _np_dtype(triton_type: Any) -> np.dtype[Any]:
    """NumPy's name of a Triton type; Triton builds its whole dictionary at every call."""
    if isinstance(triton_type, tl.block_type):
        triton_type = triton_type.element_ty
    if isinstance(triton_type, tl.pointer_type):
        return np.dtype(np.uint64)
    if triton_type.name not in _np_dtypes:
        _np_dtypes[triton_type.name] = _original_np_dtype(triton_type)
    return _np_dtypes[triton_type.name]


def _quicker() -> list[tuple[Any, str, Any]]:
    """Replacements that change nothing but the time: half of it goes into these."""
    options = interpreter.interpreter_builder.options
    return [
        (interpreter, "_patch_lang", _patch_language),
        (interpreter, "_get_np_dtype", _np_dtype),
        # The interpreter computes int32 overflow checks and drops their result.
        (interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False)),
    ]
