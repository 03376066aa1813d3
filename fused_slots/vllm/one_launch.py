"""The engine's v2 model runner with its tables' writes and gather folded into the slot mapping.

The runner's own methods run unchanged; around them the tables may put off what nobody reads yet.
The runner's module is imported long after the plugin has registered, so its methods are wrapped
when the first tables are built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.patches import PATCHES
from fused_slots.vllm.releases.contract import Contract, Methods, check_methods

_contract: Contract | None = None
_OURS = "_fused_slots_wrapped"
"""Set on our wrappers; `functools.wraps` hands it on to whoever wraps them again."""


def wrap_runners(contract: Contract | None) -> None:
    """Wrap the runners of this contract, now if they are loaded, else with the first tables."""
    global _contract
    _contract = contract
    wrap_loaded_runners()


def wrap_loaded_runners() -> None:
    """Wrap `execute_model` and `prepare_attn` of the runners that are loaded.

    Does nothing the second time, and nothing for runners whose tables are the engine's own.

    Raises:
        UnsupportedVllmError: one of the two takes other arguments than in the known release.
    """
    check_runners()
    for runner, methods in _loaded(_contract):
        for name in methods:
            method = getattr(runner, name)
            if not hasattr(method, _OURS):
                PATCHES.put(runner, name, _WRAPPERS[name](method))


def check_runners(contract: Contract | None = None) -> None:
    """Check the methods of the runners that are loaded.

    Raises:
        UnsupportedVllmError: one takes other arguments than in the known release.
    """
    contract = contract or _contract
    for runner, methods in _loaded(contract):
        check_methods(runner, methods, contract.name if contract else "")


def _loaded(contract: Contract | None) -> Iterator[tuple[Any, Methods]]:
    for runner in contract.runners if contract else ():
        found = getattr(sys.modules.get(runner.module), runner.name, None)
        if found is not None:
            yield found, runner.methods


def _defer_writes(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables = getattr(self, "block_tables", None)
        if not isinstance(tables, DeferringBlockTables):
            return execute_model(self, *args, **kwargs)
        with tables.defer_writes():
            return execute_model(self, *args, **kwargs)

    return _mark(wrapped)


def _fuse_gather(prepare_attn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare_attn)
    def wrapped(self: Any, input_batch: Any) -> Any:
        tables = self.block_tables
        # Prefill context parallelism gathers and maps two different batches. Runners of releases
        # without it have no such attribute.
        pcp_manager = getattr(self, "pcp_manager", None)
        if not isinstance(tables, DeferringBlockTables) or pcp_manager is not None:
            return prepare_attn(self, input_batch)
        with tables.fuse_gather():
            return prepare_attn(self, input_batch)

    return _mark(wrapped)


def _mark(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    setattr(wrapped, _OURS, True)
    return wrapped


_WRAPPERS = {"execute_model": _defer_writes, "prepare_attn": _fuse_gather}
