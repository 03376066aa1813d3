"""What one program did in order of issue, and whether its pipes ran it in an order that is safe.

A core issues instructions one by one to pipes that run beside each other: scalar unit, vector
unit, transfers in, transfers out. Two instructions on one byte, one of which writes it, must be
ordered: by the scalar unit's own order, by a barrier of their pipe, or by flags. The scalar unit
issues for all, so what it has waited for is done before anything that it issues later. Nothing else
orders, neither the issue alone nor what a library call waits for inside.

`Recorder` notes instructions, synchronisation and every pair of instructions that touch a byte one
after the other. `Trace.unordered` replays the synchronisation with one clock a pipe and answers
with the first pair that nothing orders; it can leave out single waits or barriers, by their line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

PIPES = ("S", "V", "MTE2", "MTE3")
LINE = 64  # bytes: of the cache between the scalar unit and global memory
_OTHERS = {"MTE1": "MTE2", "M": "V", "FIX": "MTE3"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its pipe, its line of the lowered text, its callee or operation."""

    pipe: str
    line: int
    name: str


@dataclass(frozen=True)
class Unordered:
    """Two accesses of one byte, one of them a write, that may run in either order."""

    first: Instruction
    second: Instruction

    def __str__(self) -> str:
        a, b = self.first, self.second
        return f"line {a.line} {a.name} ({a.pipe}) and line {b.line} {b.name} ({b.pipe})"


@dataclass
class Trace:
    """One program: actions in order of issue, and conflicts: earlier instructions by the later one.

    `touched` holds the bytes of each instruction's operands, `missed` the scalar accesses to a line
    of global memory that the program had not accessed before. Actions: ("issue", number),
    ("scalar", operations), ("set" | "wait", event, line) and ("barrier", pipe, line).
    """

    instructions: list[Instruction] = field(default_factory=list)
    actions: list[tuple[Any, ...]] = field(default_factory=list)
    conflicts: dict[int, list[int]] = field(default_factory=dict)
    touched: list[int] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for programs that did the same and touched bytes in the same order."""
        lines = tuple(i.line for i in self.instructions)
        return lines, tuple((b, *a) for b, a in self.conflicts.items())

    def lines_of_synchronisation(self) -> set[int]:
        """Lines of the waits and barriers that were executed."""
        return {action[2] for action in self.actions if action[0] in ("wait", "barrier")}

    def unordered(self, without: frozenset[int] = frozenset()) -> Unordered | None:
        """The first conflict that no order holds, waits and barriers of these lines left out."""
        clocks = {pipe: dict.fromkeys(PIPES, -1) for pipe in PIPES}
        last = dict.fromkeys(PIPES, -1)
        tokens: dict[Any, list[dict[str, int]]] = {}
        for kind, what, *line in self.actions:
            if kind == "issue":
                now = self.instructions[what]
                clock = clocks[now.pipe]
                _join(clock, {**clocks["S"], "S": -1})
                for number in self.conflicts.get(what, ()):
                    before = self.instructions[number]
                    if before.pipe == now.pipe == "S":
                        continue
                    if clock[before.pipe] < number:
                        return Unordered(before, now)
                last[now.pipe] = what
            elif kind == "set":
                tokens.setdefault(what, []).append(_completed(clocks, last, what[0]))
            elif kind == "wait":
                token = tokens[what].pop(0)
                if line[0] not in without:
                    _join(clocks[what[1]], token)
            elif kind == "barrier" and line[0] not in without:
                pipes = PIPES if what == "ALL" else (what,)
                whole: dict[str, int] = dict.fromkeys(PIPES, -1)
                for pipe in pipes:
                    _join(whole, _completed(clocks, last, pipe))
                for pipe in pipes:
                    _join(clocks[pipe], whole)
        return None


def _completed(
    clocks: dict[str, dict[str, int]], last: dict[str, int], pipe: str
) -> dict[str, int]:
    """What is known to be done once a pipe has done all that it was given."""
    return {**clocks[pipe], pipe: last[pipe]}


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for pipe, number in other.items():
        if number > clock[pipe]:
            clock[pipe] = number


class _Touched:
    """The last instruction that wrote each byte of a memory, and the last of each pipe to read."""

    def __init__(self, size: int) -> None:
        self.writer = np.zeros(size, np.int64)
        self.readers = {pipe: np.zeros(size, np.int64) for pipe in PIPES}


class Recorder:
    """Builds the trace of one program after another. Instructions are numbered over the launch."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._memories: dict[int, _Touched] = {}
        self._issued = 0
        self._base = 0
        self._cached = set[tuple[int, int]]()

    def start_program(self) -> None:
        self.trace = Trace()
        self._base = self._issued + 1
        self._cached = set[tuple[int, int]]()

    def issue(self, pipe: str, line: int, name: str) -> None:
        self._issued += 1
        pipe = _OTHERS.get(pipe, pipe)
        self.trace.actions.append(("issue", len(self.trace.instructions)))
        self.trace.instructions.append(Instruction(pipe, line, name))
        self.trace.touched.append(0)

    def act(self, *action: Any) -> None:
        self.trace.actions.append(action)

    def access(self, memory: Any, first: int, last: int, write: bool) -> None:
        """Bytes [first, last) by the instruction issued last."""
        known = self._memories.get(id(memory))
        if known is None:
            known = self._memories[id(memory)] = _Touched(len(memory.data))
        pipe = self.trace.instructions[-1].pipe
        self.trace.touched[-1] += last - first
        if memory.name != "UB" and pipe == "S":
            line = (id(memory), first // LINE)
            if line not in self._cached:
                self._cached.add(line)
                self.trace.missed.add(len(self.trace.instructions) - 1)
        self._conflicts(known.writer[first:last])
        if write:
            for reader in known.readers.values():
                self._conflicts(reader[first:last])
            known.writer[first:last] = self._issued
        else:
            known.readers[pipe][first:last] = self._issued

    def _conflicts(self, earlier: np.ndarray) -> None:
        if earlier.size == 0 or int(earlier.max()) < self._base:
            return
        numbers = {int(earlier[0])} if (earlier == earlier[0]).all() else set(earlier.tolist())
        now = self._issued - self._base
        known = self.trace.conflicts.setdefault(now, [])
        for number in numbers:
            at = number - self._base
            if 0 <= at < now and at not in known:
                known.append(at)
