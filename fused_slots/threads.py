"""Checked mode's guard: a manager is used by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from threading import RLock
from typing import Any

from fused_slots.faults import InvalidArgumentError


def guard_threads(tables: Any, in_use: Any = None) -> None:
    """Make the public methods of this object raise while another thread is in one of them.

    Its class becomes a subclass, so that managers that are not checked pay nothing.

    Args:
        tables: the object.
        in_use: the guard of the manager that it belongs to; None = one of its own.
    """
    tables._in_use = in_use or RLock()
    cls: type = type(tables)
    if cls not in _GUARDED:
        _GUARDED[cls] = _guarded(cls)
    tables.__class__ = _GUARDED[cls]


_GUARDED: dict[type, type] = {}


def _guarded(cls: type) -> type:
    calls = [name for name in dir(cls) if name[0] != "_" and isfunction(getattr(cls, name))]
    members: dict[str, Any] = {name: _guard(cls, name) for name in calls}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), members | named)


def _guard(cls: type, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._in_use.acquire(blocking=False):
            raise InvalidArgumentError(
                name,
                expected="one thread at a time in a manager",
                actual="a call while another thread is in one",
                hint="Take a lock around calls, or give each thread a manager of its own",
            )
        try:
            return getattr(cls, name)(self, *args, **kwargs)
        finally:
            self._in_use.release()

    call.__name__, call.__doc__ = name, getattr(cls, name).__doc__
    return call
