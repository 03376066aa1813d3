"""The engine's model runners, wrapped: one launch a step in v2, and pools that the tables know.

The runners' own methods run unchanged. Around those of v2 the tables may put off what nobody reads
yet, so that writes and gather are folded into the slot mapping. A runner's module is imported long
after the plugin has registered, so its methods are wrapped when the first tables are built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.patches import PATCHES
from fused_slots.vllm.pools import follow_pools
from fused_slots.vllm.releases.contract import Contract, Runner, check_methods
from fused_slots.vllm.v1 import MultiGroupBlockTable

_contract: Contract | None = None
_OURS = "_fused_slots_wrapped"
"""Set on our wrappers; `functools.wraps` hands it on to whoever wraps them again."""


def wrap_runners(contract: Contract | None) -> None:
    """Wrap the runners of this contract, now if they are loaded, else with the first tables."""
    global _contract
    _contract = contract
    wrap_loaded_runners()


def wrap_loaded_runners() -> None:
    """Wrap the methods of the runners that are loaded.

    Does nothing the second time, and nothing for runners whose tables are the engine's own.

    Raises:
        UnsupportedVllmError: one of v2 takes other arguments than in the known release.
    """
    check_runners()
    for owner, runner in _loaded(_contract):
        for name in runner.methods:
            method = getattr(owner, name)
            if not hasattr(method, _OURS):
                PATCHES.put(owner, name, _WRAPPERS[runner.runner, name](method))


def check_runners(contract: Contract | None = None) -> None:
    """Check the methods of the v2 runner, if it is loaded; what wraps v1's takes any arguments.

    Raises:
        UnsupportedVllmError: one takes other arguments than in the known release.
    """
    contract = contract or _contract
    for owner, runner in _loaded(contract):
        if runner.runner == "v2":
            check_methods(owner, runner.methods, contract.name if contract else "")


def _loaded(contract: Contract | None) -> Iterator[tuple[Any, Runner]]:
    for runner in contract.runners if contract else ():
        owner = getattr(sys.modules.get(runner.module), runner.name, None)
        if owner is not None:
            yield owner, runner


def _defer_writes(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables = getattr(self, "block_tables", None)
        if not isinstance(tables, DeferringBlockTables):
            return execute_model(self, *args, **kwargs)
        follow_pools(tables, getattr(self, "kv_cache_config", None))
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


def _tell_pools(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables = getattr(getattr(self, "input_batch", None), "block_table", None)
        if isinstance(tables, MultiGroupBlockTable):
            follow_pools(tables.manager, getattr(self, "kv_cache_config", None))
        return execute_model(self, *args, **kwargs)

    return _mark(wrapped)


def _mark(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    setattr(wrapped, _OURS, True)
    return wrapped


_WRAPPERS = {
    ("v2", "execute_model"): _defer_writes,
    ("v2", "prepare_attn"): _fuse_gather,
    ("v1", "execute_model"): _tell_pools,
}
