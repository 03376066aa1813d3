"""What one release line of an engine looks like from outside: data that the plugin compares with.

A contract is taken only where the version is one that was read and every signature is the one
noted: a release of the same version with other arguments, as a fork has, fits none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Methods = Mapping[str, tuple[str, ...]]
"""Methods of a class and the names of their arguments, in order, without self."""


@dataclass(frozen=True)
class Tables:
    """A class of block tables that one of ours stands in for.

    Attributes:
        runner: "v1" or "v2", the model runner that builds it.
        module: where it is defined.
        name: its name there, and in every module that imports it.
        methods: those that the runner calls, `__init__` among them.
        read_outside: attributes and methods that other modules of the engine read of the tables;
            of a multi-group table's groups too.
        stand_in: "module:class"; it takes the constructor's arguments by their names in `methods`.
        bound_to: "module.name" of further names that the engine itself binds to the class.
    """

    runner: str
    module: str
    name: str
    methods: Methods
    read_outside: frozenset[str]
    stand_in: str
    bound_to: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def load_stand_in(self) -> Any:
        """Our class."""
        module, name = self.stand_in.split(":")
        return getattr(import_module(module), name)


@dataclass(frozen=True)
class Runner:
    """A model runner class whose methods are wrapped: between them writes may be deferred."""

    module: str
    name: str
    methods: Methods


@dataclass(frozen=True)
class Contract:
    """One release line.

    Attributes:
        name: how it is called in logs, such as "vllm 0.26 to 0.27".
        releases: the exact versions read, by distribution; all of them must be installed.
        tables: what is replaced.
        runners: what is wrapped.
        spec_kinds: what the table of each KV cache spec class holds (`fused_slots.vllm.config`).
        default_runner: a sentence: which runner the engine takes by itself.
    """

    name: str
    releases: Mapping[str, tuple[str, ...]]
    tables: tuple[Tables, ...]
    runners: tuple[Runner, ...] = ()
    spec_kinds: Mapping[str, str] = field(default_factory=dict)
    default_runner: str = ""

    def fits_versions(self, installed: Mapping[str, str]) -> bool:
        """Whether these versions, by distribution, are among those read."""
        return all(
            installed.get(distribution, "").split("+")[0] in versions
            for distribution, versions in self.releases.items()
        )

    def mismatches(self) -> Iterator[str]:
        """Each method of the tables that is another than noted, in a sentence.

        Imports the tables' modules. The runners' are left to the engine, which imports them late.
        """
        for tables in self.tables:
            owner = getattr(import_module(tables.module), tables.name, None)
            yield from method_mismatches(owner, tables.methods)


def method_mismatches(owner: Any, methods: Methods) -> Iterator[str]:
    """Each method of a class whose arguments are others than these, in a sentence."""
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        actual = parameters(method) if callable(method) else None
        if actual != expected:
            where = f"{getattr(owner, '__module__', '?')}.{getattr(owner, '__qualname__', owner)}"
            got = "no such method" if actual is None else f"({', '.join(actual)})"
            yield f"{where}.{name}: expected ({', '.join(expected)}); got {got}"


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments, in order, without self."""
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("self",) else names
