"""Events that the vector library's own bodies set and wait, read from the compiler's bitcode.

A call of the library is one operation in HIVM, but its body may set and wait an event of its own
between two pipes. If the caller holds the same event set across the call, the body's wait takes
the caller's token, and a synchronisation is lost. Bitcode is read as text, block by block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import NamedTuple

from hivm.parser import Block, Module, Operation

PIPES = {0: "PIPE_S", 1: "PIPE_V", 4: "PIPE_MTE2", 5: "PIPE_MTE3"}
_FLAG = re.compile(r"@llvm\.hivm\.SET\.FLAG\.IMM\(i64 (\d+), i64 (\d+), i64 (\d+)\)")
_CALL = re.compile(r"call [^@]*@\"?([\w.]+)\"?\(")
_LABEL = re.compile(r'"?([\w.]+)"?:')
_TARGET = re.compile(r'label %"?([\w.]+)"?')
_HIVM_FLAG = re.compile(r"\[<(\w+)>, <(\w+)>, <EVENT_ID(\d)>\]")


class Event(NamedTuple):
    """A flag that one pipe sets and another one waits for."""

    source: str
    target: str
    number: int


class Collision(NamedTuple):
    """A library call across which the caller holds an event that the call's body uses."""

    line: int
    callee: str
    event: Event


@dataclass
class _Body:
    """Of one block: the events that it sets, what it calls, and where it goes."""

    events: set[Event] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    targets: list[str] = field(default_factory=list)
    returns: bool = False


class Library:
    """The bodies of the vector library of one bitcode file.

    Args:
        name: the file among the compiler's own.
    """

    def __init__(self, name: str = "meta_op.aiv.c220.bc") -> None:
        import llvmlite.binding as llvm

        bitcode = (files("ascendnpuir") / "lib" / name).read_bytes()
        self._functions = dict(_functions(str(llvm.parse_bitcode(bitcode))))
        self._known: dict[tuple[str, bool], frozenset[Event]] = {}

    def events(self, callee: str, always: bool = False) -> frozenset[Event]:
        """Events that a library call sets on some path through its body, or on all."""
        return self._events(f"_mlir_ciface_{callee}", always)

    def _events(self, name: str, always: bool) -> frozenset[Event]:
        key = (name, always)
        if key not in self._known:
            self._known[key] = frozenset()  # of a function that calls itself
            blocks = self._functions.get(name, {})
            of_block = {
                label: block.events.union(*(self._events(c, always) for c in block.calls))
                for label, block in blocks.items()
            }
            found = set().union(*of_block.values()) if of_block else set()
            if always:
                found = {event for event in found if not _avoidable(blocks, of_block, event)}
            self._known[key] = frozenset(found)
        return self._known[key]


def _avoidable(
    blocks: dict[str, _Body], of_block: dict[str, set[Event]], event: Event
) -> bool:
    """Whether a path from the first block to a return passes no block with the event."""
    waiting, seen = [next(iter(blocks))], set()
    while waiting:
        label = waiting.pop()
        if label in seen or event in of_block[label]:
            continue
        seen.add(label)
        if blocks[label].returns:
            return True
        waiting += blocks[label].targets
    return False


def _functions(text: str) -> Iterator[tuple[str, dict[str, _Body]]]:
    blocks: dict[str, _Body] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("define"):
            match = re.search(r'@"?([\w.]+)"?\(', line)
            name = match[1] if match else ""
            blocks = {"": _Body()}
        elif line.startswith("}"):
            yield name, blocks
            name = ""
        elif name:
            label = _LABEL.match(line)
            if label:
                if not blocks[next(reversed(blocks))].targets and list(blocks) == [""]:
                    blocks[""].targets = [label[1]]  # the first block has a label after all
                blocks[label[1]] = _Body()
                continue
            block = blocks[next(reversed(blocks))]
            flag = _FLAG.search(line)
            if flag:
                source, target, number = map(int, flag.groups())
                block.events.add(Event(PIPES.get(source, ""), PIPES.get(target, ""), number))
            elif " call " in line:
                block.calls.update(_CALL.findall(line))
            elif line.startswith(("  br ", "  switch ")) or " label %" in line:
                block.targets += _TARGET.findall(line)
            elif line.startswith("  ret"):
                block.returns = True


def collisions(module: Module, known: Library, always: bool = True) -> list[Collision]:
    """Calls of a kernel across which an event that their bodies use is set, in textual order.

    Args:
        module: with structured loops, as of 910B.
        known: the library that it calls.
        always: count events that a body uses on all its paths; else on any.
    """
    found: dict[Collision, None] = {}

    def run(blocks: list[Block], live: frozenset[Event]) -> frozenset[Event]:
        for block in blocks:
            for operation in block.operations:
                live = step(operation, live)
        return live

    def step(operation: Operation, live: frozenset[Event]) -> frozenset[Event]:
        flag = _HIVM_FLAG.search(operation.text)
        if flag and operation.name.endswith(("set_flag", "wait_flag")):
            event = Event(flag[1], flag[2], int(flag[3]))
            return live | {event} if operation.name.endswith("set_flag") else live - {event}
        if operation.callee and operation.name.endswith("call"):
            for event in sorted(known.events(operation.callee, always) & live):
                found[Collision(operation.line, operation.callee, event)] = None
        if not operation.regions:
            return live
        if operation.name in ("scf.for", "scf.while"):
            inside = live
            for _ in range(2):  # what one iteration leaves set, the next begins with
                for region in operation.regions:
                    inside |= run(region, inside)
            return inside
        ends = [run(region, live) for region in operation.regions]
        return frozenset().union(*ends, live if len(ends) < 2 else frozenset())

    run(module.entry.blocks, frozenset())
    return list(found)
