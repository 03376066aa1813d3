"""The vector library as the compiler's package ships it: LLVM bitcode, read with llvmlite.

`Library` answers which events a library call may set or wait for: those of its body and of all that
the body calls. None is written down here: another release of the package is read anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "ALL")
"""Names of the pipes by the number that the intrinsics take."""
_BITCODE = "meta_op.aiv.c220.bc"
_CALL = re.compile(r'call [^@\n]*@"?([\w.$]+)"?\((.*)\)')
_FLAGS = ("SET.FLAG.IMM", "WAIT.FLAG.IMM")
_CALLED = re.compile(r'@"?([\w.$]+)"?\(')

Event = tuple[str, str, int]
"""Source pipe, target pipe, number."""


def event_of(operands: list[int]) -> Event:
    source, target, number = operands
    return PIPES[source], PIPES[target], number


@dataclass(eq=False)
class Library:
    """Functions of one bitcode file. Raises KeyError for a call that it does not hold."""

    path: Path
    _links: dict[str, tuple[set[str], set[Event]]] = field(default_factory=dict)

    @cached_property
    def _text(self) -> str:
        from llvmlite import binding

        return str(binding.parse_bitcode(self.path.read_bytes()))

    @cached_property
    def _parts(self) -> tuple[str, list[str]]:
        """What stands outside functions, and their texts. (One by one each takes a second.)"""
        first, *parts = self._text.split("\ndefine ")
        cut = [part.partition("\n}\n") for part in parts]
        return "".join([first, *(rest for *_, rest in cut)]), [body for body, *_ in cut]

    @property
    def head(self) -> str:
        """Everything outside functions: types, globals, declarations."""
        return self._parts[0]

    @cached_property
    def functions(self) -> dict[str, str]:
        """Text of every function with a body, from behind `define` to before its last brace."""
        return {m[1]: part for part in self._parts[1] if (m := _CALLED.search(part))}

    def holds(self, call: str) -> bool:
        """Whether a call of a lowered module, as it is written there, is a library function."""
        return self.symbol(call) in self.functions

    def events(self, call: str) -> frozenset[Event]:
        """Events that the call may set or wait for, whatever its operands."""
        if not self.holds(call):
            raise KeyError(call)
        return frozenset().union(*(self._link(name)[1] for name in self.closure(call)))

    def closure(self, call: str) -> list[str]:
        """The functions of a call's body: its own, those that this calls, and so on."""
        found: dict[str, None] = {}
        waiting = [self.symbol(call)]
        while waiting:
            name = waiting.pop()
            if name in self.functions and name not in found:
                found[name] = None
                waiting += self._link(name)[0]
        return list(found)

    def _link(self, name: str) -> tuple[set[str], set[Event]]:
        """The functions that a function calls, and the events that it itself sets or waits for."""
        if name not in self._links:
            calls = _CALL.findall(self.functions[name])
            events = {
                event_of([int(n) for n in re.findall(r"i64 (-?\d+)", operands)])
                for called, operands in calls
                if called.endswith(_FLAGS)
            }
            self._links[name] = {called for called, _ in calls}, events
        return self._links[name]

    def symbol(self, call: str) -> str:
        return call if call in self.functions else f"_mlir_ciface_{call}"


class UnreadLibrary:
    """The 950's library, which no public LLVM reads: any call may use any of the last two events.

    The 910B's bodies use event 6 alone; event 7 is the one that public sources keep for them.
    """

    def holds(self, call: str) -> bool:
        return True

    def events(self, call: str) -> frozenset[Event]:
        pairs = ((a, b) for a in PIPES[:-1] for b in PIPES[:-1] if a != b)
        return frozenset((a, b, number) for a, b in pairs for number in (6, 7))


@cache
def library(target: str) -> Library | UnreadLibrary:
    """The vector library that bishengir-compile links for a target; parsed once a process."""
    if target.startswith("Ascend950"):
        return UnreadLibrary()
    return Library(Path(str(files("ascendnpuir") / "lib" / _BITCODE)))
