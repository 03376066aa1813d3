"""vLLM's v2 `GPUModelRunner` with its tables' writes and gather folded into the slot mapping.

The runner's own methods run unchanged; around them the tables may put off what nobody reads yet.
The runner's module is imported long after the plugin has registered, so its methods are wrapped
when the first tables are built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.patches import PATCHES
from fused_slots.vllm.signatures import MODEL_RUNNER, check_methods

_RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"


def wrap_model_runner() -> None:
    """Wrap the runner's `execute_model` and `prepare_attn`, if its module is loaded.

    Does nothing the second time, and nothing for runners whose tables are vLLM's own.

    Raises:
        UnsupportedVllmError: one of the two takes other arguments than in the known release.
    """
    runner = getattr(sys.modules.get(_RUNNER_MODULE), "GPUModelRunner", None)
    if runner is None or PATCHES.has(runner, "prepare_attn"):
        return
    check_methods(runner, MODEL_RUNNER)
    PATCHES.put(runner, "execute_model", _defer_writes(runner.execute_model))
    PATCHES.put(runner, "prepare_attn", _fuse_gather(runner.prepare_attn))


def _defer_writes(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables = getattr(self, "block_tables", None)
        if not isinstance(tables, DeferringBlockTables):
            return execute_model(self, *args, **kwargs)
        with tables.defer_writes():
            return execute_model(self, *args, **kwargs)

    return wrapped


def _fuse_gather(prepare_attn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare_attn)
    def wrapped(self: Any, input_batch: Any) -> Any:
        tables = self.block_tables
        # Prefill context parallelism gathers and maps two different batches.
        if not isinstance(tables, DeferringBlockTables) or self.pcp_manager is not None:
            return prepare_attn(self, input_batch)
        with tables.fuse_gather():
            return prepare_attn(self, input_batch)

    return wrapped
