"""Events that are set and not yet waited for when a library call uses them itself.

A core has eight events for each pair of pipes. The compiler chooses numbers for its own flags
without knowing which of them the library's bodies set and wait for; where the two meet, a set is
taken by the wrong wait, or a second set of a set event is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .bodies import Event, Library, UnreadLibrary
from .parser import Block, Module, Operation

ANY = -1
"""The number of an event that is chosen at run time."""


@dataclass(frozen=True)
class Collision:
    """A call that uses an event which is live across it."""

    line: int
    call: str
    event: Event

    def __str__(self) -> str:
        source, target, number = self.event
        return f"line {self.line}: @{self.call} uses {source} -> {target} event {number}, live"


def collisions(module: Module, library: Library | UnreadLibrary) -> list[Collision]:
    """Every library call of the entry function across which an event that it may use is live."""
    reader = _Reader(library, frozenset(module.functions))
    blocks = module.entry.blocks
    if len(blocks) == 1:
        reader.straight(blocks[0].operations, frozenset())
    else:
        reader.graph(blocks)
    return sorted(reader.found, key=lambda c: (c.line, c.event))


def event_of(op: Operation) -> Event:
    """Of a set_flag or wait_flag."""
    match = re.match(r"\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|%)", op.text)
    assert match, op.text
    source, target, number = match.groups()
    return source, target, ANY if number is None else int(number)


Live = frozenset[Event]


@dataclass
class _Reader:
    library: Library | UnreadLibrary
    functions: frozenset[str]
    found: set[Collision] = field(default_factory=set)

    def straight(self, operations: list[Operation], live: Live) -> Live:
        """What is live behind the operations, given what is before them."""
        for op in operations:
            if op.name == "hivm.hir.set_flag":
                live |= {event_of(op)}
            elif op.name == "hivm.hir.wait_flag":
                live -= {event_of(op)}
            elif op.name.endswith("call"):
                self._call(op, live)
            elif op.name == "scf.if":
                branches = [self._region(region, live) for region in op.regions]
                live = frozenset().union(*branches, *([live] if len(branches) == 1 else []))
            elif op.regions:
                live = self._loop(op, live)
        return live

    def graph(self, blocks: list[Block]) -> None:
        """A control-flow graph: passes over all blocks until nothing more becomes live."""
        before: dict[str, Live] = {block.label: frozenset() for block in blocks}
        grown = True
        while grown:
            grown = False
            for block in blocks:
                after = self.straight(block.operations, before[block.label])
                for target in re.findall(r"\^(\w+)", block.operations[-1].text):
                    grown |= not after <= before[target]
                    before[target] |= after

    def _loop(self, op: Operation, live: Live) -> Live:
        """A loop's body may run again with whatever it left live itself."""
        while True:
            after = live
            for region in op.regions:
                after = self._region(region, after)
            if after <= live:
                return after if op.name == "scf.while" else live
            live |= after

    def _region(self, blocks: list[Block], live: Live) -> Live:
        return self.straight([op for block in blocks for op in block.operations], live)

    def _call(self, op: Operation, live: Live) -> None:
        if not live or op.callee in self.functions or not self.library.holds(op.callee):
            return
        for event in self.library.events(op.callee):
            if event in live or (*event[:2], ANY) in live:
                self.found.add(Collision(op.line, op.callee, event))
