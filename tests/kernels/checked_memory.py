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
- atomics are exempt among themselves, not against plain accesses of other programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import getcallargs
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fused_slots.backends.triton_backend import TritonBackend

Runs = list[tuple[int, int]]
"""Half-open ranges of addresses."""

GARBAGE = (0, 1, -1, 77, -2_000_000_011, 2_000_000_011)
"""What a program reads where another one of its launch has written."""

REPORTED = 4
"""Addresses that an error names."""


class AccessError(AssertionError):
    """A kernel accessed memory that it must not touch, or two programs raced."""


@dataclass
class _Log:
    """Accesses of one kind in one launch: addresses, the programs, and the values if written."""

    addresses: list[np.ndarray] = field(default_factory=list)
    programs: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, addresses: np.ndarray, program: int, values: np.ndarray | None = None) -> None:
        self.addresses.append(addresses)
        self.programs.append(np.full(len(addresses), program, dtype=np.int64))
        if values is not None:
            self.values.append(values.astype(np.int64))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = np.concatenate(self.values) if self.values else np.zeros(0, np.int64)
        if not self.addresses:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64), values
        return np.concatenate(self.addresses), np.concatenate(self.programs), values


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
        self._program = 0
        self._written = np.zeros(0, dtype=np.uint64)

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
            (TritonBackend, "gather", self._lending(TritonBackend.gather)),
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
            programs = list(enumerate(product(*map(range, grid))))
            if self._shuffled:
                self._rng.shuffle(programs)
            for self._program, place in programs:
                self._written = np.unique(self._logs["store"].arrays()[0])
                builder.set_grid_idx(*place)
                executor.fn(**arguments)
            self._end()

        return call

    def _begin(self, tensors: Sequence[torch.Tensor]) -> None:
        self.launches += 1
        allowed = [run for tensor in [*tensors, *self._lent] for run in _runs(tensor)]
        banned = [run for tensor in self._forbidden for run in _runs(tensor)]
        ranges = _without(_merged(allowed), _merged(banned))
        self._low = np.array([low for low, _ in ranges], dtype=np.uint64)
        self._high = np.array([high for _, high in ranges], dtype=np.uint64)
        self._logs = {"load": _Log(), "store": _Log(), "atomic": _Log()}

    def _check(self, kind: str, pointers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of the lanes that are on, all of them in bounds; and the mask."""
        lanes = np.broadcast_to(mask.data, pointers.data.shape).ravel().astype(bool)
        addresses = pointers.data.ravel()[lanes]
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        run = np.searchsorted(self._low, addresses, side="right") - 1
        inside = run >= 0
        inside &= addresses + size <= self._high[run] if len(self._high) else False
        if not inside.all():
            self._report(f"a {kind} outside every tensor of the launch", addresses[~inside])
        self.accesses[kind] += len(addresses)
        return addresses, lanes

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            addresses, lanes = self._check("load", pointers, mask)
            self._logs["load"].add(addresses, self._program)
            result = load(builder, pointers, mask, *rest)
            if len(self._written):
                place = np.searchsorted(self._written, addresses)
                foreign = self._written[np.minimum(place, len(self._written) - 1)] == addresses
                if foreign.any():
                    self.garbage += int(foreign.sum())
                    flat = result.data.reshape(-1)
                    flat[np.flatnonzero(lanes)[foreign]] = self._rng.choice(GARBAGE)
            return result

        return checked

    def _storing(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            addresses, lanes = self._check("store", pointers, mask)
            values = np.broadcast_to(value.data, pointers.data.shape).ravel()[lanes]
            self._logs["store"].add(addresses, self._program, values)
            return store(builder, pointers, value, mask, *rest)

        return checked

    def _counting(self, rmw: Callable[..., Any]) -> Callable[..., Any]:
        def checked(builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            addresses, _ = self._check("atomic", pointers, mask)
            self._logs["atomic"].add(addresses, self._program)
            return rmw(builder, op, pointers, value, mask, *rest)

        return checked

    def _lending(self, gather: Callable[..., None]) -> Callable[..., None]:
        def lent(backend: Any, idx: Any, padded: Any, computed: Any, out: Any) -> None:
            with self.lend([] if out is None else list(out)):
                gather(backend, idx, padded, computed, out)

        return lent

    def _end(self) -> None:
        """Look for races in what the launch's programs did."""
        stores, store_programs, values = self._logs["store"].arrays()
        order = np.lexsort((store_programs, stores))
        stores, store_programs, values = stores[order], store_programs[order], values[order]
        again = stores[1:] == stores[:-1]
        clash = again & (values[1:] != values[:-1])
        if clash.any():
            self._report("two stores of different values to one address", stores[1:][clash])
        self._foreign("counted by one program, stored by another", "atomic", stores, store_programs)
        counted, count_programs, _ = self._logs["atomic"].arrays()
        order = np.lexsort((count_programs, counted))
        self._foreign(
            "read by one program and counted by another",
            "load",
            counted[order],
            count_programs[order],
        )

    def _foreign(self, what: str, kind: str, written: np.ndarray, writers: np.ndarray) -> None:
        """No program does `kind` to an address that another program writes (sorted by address)."""
        if not len(written):
            return
        addresses, programs, _ = self._logs[kind].arrays()
        first = np.searchsorted(written, addresses, side="left")
        last = np.searchsorted(written, addresses, side="right") - 1
        touched = last >= first
        first, last = first[touched], last[touched]
        own = (writers[first] == programs[touched]) & (writers[last] == programs[touched])
        if not own.all():
            self._report(what, addresses[touched][~own])

    def _report(self, what: str, addresses: np.ndarray) -> None:
        places = ", ".join(f"{address:#x}" for address in addresses[:REPORTED].tolist())
        raise AccessError(f"{what}: {len(addresses)} address(es), {places} program {self._program}")


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

