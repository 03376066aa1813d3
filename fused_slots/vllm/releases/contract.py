"""What one release line of an engine looks like from outside: data that the plugin compares with.

A contract is taken only where the version is one that was read and every signature is the one
noted: a build of the same version with other arguments, as a fork has, fits none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fused_slots.faults import BlockTableError

Methods = Mapping[str, tuple[str, ...]]
"""Methods of a class and the names of their arguments, in order, without self."""


class UnsupportedVllmError(BlockTableError):
    """The vLLM, or the vllm-ascend, that is installed has another interface than the known ones."""


@dataclass(frozen=True)
class Tables:
    """A class of block tables that one of ours stands in for.

    Attributes:
        runner: "v1" or "v2", the model runner that builds it.
        module: where it is defined.
        name: its name there.
        methods: those that the runner calls, `__init__` among them.
        read_outside: attributes and methods that other modules of the engine read of the tables;
            of a multi-group table's groups too.
        stand_in: "module:class"; it takes the constructor's arguments by their names in `methods`.
        builders: "module.name", the names under which the engine builds it.
        waits: the class is replaced when the engine has imported `module`, and not before.
    """

    runner: str
    module: str
    name: str
    methods: Methods
    read_outside: frozenset[str]
    stand_in: str
    builders: tuple[str, ...]
    waits: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def load_stand_in(self) -> Any:
        """Our class."""
        module, name = self.stand_in.split(":")
        return getattr(import_module(module), name)


@dataclass(frozen=True)
class Runner:
    """A model runner class whose methods are wrapped.

    Attributes:
        runner: "v1" or "v2"; between the v2 runner's methods writes may be deferred.
        module, name, methods: as of `Tables`.
    """

    runner: str
    module: str
    name: str
    methods: Methods


@dataclass(frozen=True)
class Contract:
    """One release line.

    Attributes:
        name: how it is called in logs, such as "vllm 0.26 and 0.27".
        releases: the exact versions read, by distribution; all of them must be installed.
        tables: what is replaced.
        runners: what is wrapped.
        spec_kinds: what the table of each KV cache spec class holds (`fused_slots.vllm.config`).
        default_runner: which runner the engine takes where nobody says.
    """

    name: str
    releases: Mapping[str, tuple[str, ...]]
    tables: tuple[Tables, ...]
    runners: tuple[Runner, ...] = ()
    spec_kinds: Mapping[str, str] = field(default_factory=dict)
    default_runner: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """The top-level modules of its distributions."""
        return tuple(distribution.replace("-", "_") for distribution in self.releases)

    def fits(self, installed: Mapping[str, str]) -> bool:
        """Whether exactly these versions, by distribution, were read; no local suffix counts."""
        return installed.keys() == self.releases.keys() and all(
            installed[distribution].split("+")[0] in versions
            for distribution, versions in self.releases.items()
        )


def check_methods(owner: Any, methods: Methods, contract: str) -> None:
    """Check that a class has these methods with exactly these arguments, in this order.

    Raises:
        UnsupportedVllmError: names the method, its arguments and those expected.
    """
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        actual = parameters(method) if callable(method) else None
        if actual != expected:
            raise UnsupportedVllmError(
                f"{owner.__module__}.{owner.__qualname__}.{name}",
                expected=f"({', '.join(expected)}), as in {contract}",
                actual="no such method" if actual is None else f"({', '.join(actual)})",
            )


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments, in order, without self."""
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("self",) else names
