"""Runs a parsed kernel: every program of the grid, in a random order, on checked memory."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from .counts import Counts
from .memory import GlobalBuffer, HivmFault, View
from .modes import EXACT, Modes
from .order import Recorder, Trace
from .parser import Module
from .runtime import Runtime
from .translate import Program, translate


@dataclass(frozen=True)
class Pointers:
    """An int64 table of addresses: entry i points at the first byte of argument `of[i]`."""

    of: list[int]


@dataclass(frozen=True)
class Alias:
    """The same memory as an earlier argument, as elements of a type."""

    of: int
    dtype: np.dtype


Argument = int | np.ndarray | Pointers | Alias
_LEADING = 3  # ffts address, lock, workspace: the compiler's own arguments, unused by vector code


@dataclass(frozen=True)
class Execution:
    """`outputs[i]` is argument i after the launch (arrays; scalars as given)."""

    outputs: list[Argument]
    counts: list[Counts]
    traces: list[Trace] = field(default_factory=list)

    def worst_core(self, cores: int) -> Counts:
        return fold_on_cores(self.counts, cores)


def fold_on_cores(counts: list[Counts], cores: int) -> Counts:
    """For every figure the largest sum over one core, programs dealt to cores in turn."""
    folded = [Counts() for _ in range(min(cores, len(counts)))]
    for number, count in enumerate(counts):
        folded[number % cores].add(count)
    return Counts(**{
        f.name: max((getattr(core, f.name) for core in folded), default=0) for f in fields(Counts)
    })  # fmt: skip


def execute(
    module: Module,
    grid: tuple[int, ...],
    arguments: list[Argument],
    *,
    modes: Modes = EXACT,
    seed: int = 0,
    recorded: bool = False,
    memory: Sequence[np.ndarray] = (),
) -> Execution:
    """Runs `module.entry` over the grid; the caller's arrays are not changed.

    `arguments` are the kernel's runtime arguments in order: an array for a pointer (of the
    pointer's element type), an int for a scalar, Alias for memory that an earlier argument
    names, Pointers for a table of addresses. `memory` is more of it, numbered on behind the
    arguments, that only addresses reach. `recorded` keeps a trace of every program. Raises a
    HivmFault that names the HIVM line and the program: OutOfBounds, Race, UninitialisedRead,
    FlagImbalance, UnsupportedOperation.
    """
    program = _translated(module, recorded)
    entry = module.entry
    x, y, z = (*grid, 1, 1)[:3]
    expected = len(entry.arguments) - _LEADING - 3
    if len(arguments) != expected:
        raise ValueError(f"{entry.name} takes {expected} arguments, {len(arguments)} given")
    buffers, values = _bind([*arguments, *memory])
    recorder = Recorder() if recorded else None
    runtime = Runtime(module.ub_capacity, modes, recorder)
    runtime.buffers = buffers
    traces: dict[int, Trace] = {}
    for buffer in buffers:
        buffer.watch = recorder.access if recorder else None
    counts = [Counts() for _ in range(x * y * z)]
    for block in np.random.default_rng(seed).permutation(x * y * z).tolist():
        runtime.reset(block)
        program.visits[:] = [0] * len(program.visits)
        for buffer in buffers:
            buffer.program = block
        try:
            program.functions[entry.name](runtime, 0, None, None, *values[:expected], x, y, z)
            runtime.finish()
        except HivmFault as fault:
            fault.where = _where(fault, program, module, block)
            raise
        counts[block] = runtime.counts
        if recorder:
            traces[block] = recorder.trace
        for visits, cost in zip(program.visits, program.costs, strict=True):
            if visits:
                counts[block].add(cost, visits)
    ordered = [traces[block] for block in sorted(traces)]
    return Execution(_outputs([*arguments, *memory], buffers), counts, ordered)


def _translated(module: Module, recorded: bool) -> Program:
    """Translates once a module object and form."""
    known: dict[bool, Program] = module.__dict__.setdefault("_programs", {})
    if recorded not in known:
        known[recorded] = translate(module, recorded=recorded)
    return known[recorded]


def _address(number: int) -> int:
    """Where argument `number` lives: far from every other."""
    return (number + 1) << 40


def _bind(arguments: list[Argument]) -> tuple[list[GlobalBuffer], list[int | View]]:
    buffers: list[GlobalBuffer] = []
    values: list[int | View] = []
    argument: Argument
    for number, argument in enumerate(arguments):
        if isinstance(argument, Pointers):
            argument = np.array([_address(target) for target in argument.of], np.int64)
        if isinstance(argument, Alias):
            buffer = values[argument.of].memory
            size = len(buffer.data) // argument.dtype.itemsize
            values.append(View(buffer, argument.dtype, 0, 0, (size,), (1,)))
        elif isinstance(argument, np.ndarray):
            content = bytearray(np.ascontiguousarray(argument).reshape(-1).view(np.uint8))
            name = f"argument {number}"
            buffer = GlobalBuffer(name, content, argument.itemsize, _address(number))
            buffers.append(buffer)
            values.append(View(buffer, argument.dtype, 0, 0, (argument.size,), (1,)))
        else:
            values.append(int(argument))
    return buffers, values


def _outputs(arguments: list[Argument], buffers: list[GlobalBuffer]) -> list[Argument]:
    by_address = {buffer.address: buffer for buffer in buffers}
    return [
        by_address[_address(number)].data.view(argument.dtype).reshape(argument.shape)
        if isinstance(argument, np.ndarray)
        else argument
        for number, argument in enumerate(arguments)
    ]


def _where(fault: HivmFault, program: Program, module: Module, block: int) -> str:
    """The HIVM line that was running: the innermost translated frame of the traceback."""
    text = f" [program {block}"
    for frame in reversed(traceback.extract_tb(fault.__traceback__)):
        if frame.filename in program.origin and frame.lineno is not None:
            line = program.origin[frame.filename][frame.lineno - 1]
            return f"{text}, line {line}: {module.lines[line - 1].strip()[:160]}]"
    return text + "]"
