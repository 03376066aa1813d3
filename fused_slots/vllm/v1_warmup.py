"""Kernels of the v1 tables in vLLM's own warm-up.

vLLM collects, while a runner is set up, objects that list compile keys, and compiles them before
it serves. Whoever builds the tables without vLLM calls `warmup` instead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable

from fused_slots import env
from fused_slots.block_tables import AscendBlockTables

_REGISTRY_MODULE = "vllm.model_executor.warmup.jit_warmup"


class SlotMappingWarmup:
    """One manager's kernels, as vLLM's warm-up registry sees a kernel."""

    def __init__(self, manager: AscendBlockTables) -> None:
        # vLLM replaces its first input batch; the registry must not keep the old tables alive.
        self._manager = weakref.ref(manager)

    def get_warmup_keys(self) -> list[str]:
        """One key, which stands for all variants of the manager; none once it is gone."""
        manager = self._manager()
        return [] if manager is None else [f"fused_slots {manager.device}, all variants"]

    def compile(self, compile_key: str) -> None:
        """Compile all variants."""
        manager = self._manager()
        if manager is not None:
            manager.warmup()

    def compile_many(self, compile_keys: Iterable[str]) -> None:
        """The same for a list of keys."""
        for key in compile_keys:
            self.compile(key)


def register_warmup(manager: AscendBlockTables) -> None:
    """Add a manager to the warm-up of the vLLM runner that is being set up, if there is one.

    Raises:
        BackendUnavailableError: no kernel can be launched, which the warm-up would find too late
            for vLLM to build tables of its own.
    """
    registry = getattr(sys.modules.get(_REGISTRY_MODULE), "JitWarmupRegistry", None)
    if registry is None:
        return
    manager._backend.try_launch()
    if env.WARMUP.read() == "1":
        registry.register(SlotMappingWarmup(manager))
