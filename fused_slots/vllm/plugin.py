"""vLLM's entry point: puts this package's block tables in the place of vLLM's.

vLLM calls `register` in every process, often more than once, and does not guard the call. What
does not fit leaves everything as it was, with one line that says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from types import ModuleType
from typing import Any

from fused_slots import env
from fused_slots.faults import BlockTableError
from fused_slots.vllm.fallback import FallsBack, logger
from fused_slots.vllm.one_launch import wrap_model_runner
from fused_slots.vllm.patches import PATCHES
from fused_slots.vllm.signatures import (
    BLOCK_TABLES,
    MULTI_GROUP_BLOCK_TABLE,
    check_ascend,
    check_methods,
    check_version,
    installed_version,
)
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedAscendBlockTables, FusedBlockTables

_V2_MODULE = "vllm.v1.worker.gpu.block_table"
_V2_READER = "vllm.v1.worker.gpu.model_runner"
_V1_MODULE = "vllm.v1.worker.block_table"
_V1_READER = "vllm.v1.worker.gpu_input_batch"
_ASCEND_PACKAGE = "vllm_ascend"
_ASCEND_MODULE = "vllm_ascend.worker.v2.block_table"


@dataclass(frozen=True)
class PluginStatus:
    """What the plugin does in this process.

    Attributes:
        active: vLLM builds this package's tables.
        reason: one sentence, why or why not.
        mode: FUSED_SLOTS_VLLM.
        vllm_version: the distribution that is installed; empty without one.
        replaced: the names in vLLM that are ours now.
    """

    active: bool
    reason: str
    mode: str
    vllm_version: str
    replaced: tuple[str, ...] = ()


_status = PluginStatus(False, "register was not called in this process", "", "")


def register() -> None:
    """Put our tables in vLLM's place, or leave it alone and say why; any number of times.

    Raises:
        UnsupportedVllmError, ConfigurationError: only with FUSED_SLOTS_VLLM=strict; the vLLM that
            is installed does not fit.
    """
    mode = ""
    try:
        mode = env.VLLM.read()
        if mode == "off":
            _restore()
            _report(PluginStatus(False, "FUSED_SLOTS_VLLM=off", mode, installed_version()))
            return
        reason = _install()
        _report(PluginStatus(True, reason, mode, installed_version(), PATCHES.names))
    except Exception as error:
        # Whatever it is, it must not keep vLLM from starting; unless it was asked to insist.
        _restore()
        _report(PluginStatus(False, _sentence(error), mode, installed_version()))
        if mode == "strict":
            raise


def unregister() -> None:
    """Give every name back to vLLM; tables that were built already stay as they are."""
    global _status
    _restore()
    _status = PluginStatus(False, "unregistered", _status.mode, _status.vllm_version)


def status() -> PluginStatus:
    """What the last call of `register` in this process came to."""
    return _status


def find_obstacle() -> str:
    """Why `register` would stay off in this process, in a sentence; empty = it would be active.

    Imports vLLM and changes nothing.
    """
    try:
        if env.VLLM.read() == "off":
            return "FUSED_SLOTS_VLLM=off"
        _find_targets()
    except Exception as error:
        return _sentence(error)
    return ""


@dataclass(frozen=True)
class _Target:
    """A name to replace: where it is defined, what it was, and what takes its place."""

    module: ModuleType
    name: str
    stock: type
    stand_in: FallsBack

    @property
    def readers(self) -> list[ModuleType]:
        """Loaded modules with the class under its name: its own, and those that imported it."""
        root = self.module.__name__.split(".")[0] + "."
        loaded = [module for name, module in sys.modules.items() if name.startswith(root)]
        return [m for m in loaded if getattr(m, "__dict__", {}).get(self.name) is self.stock]


def _find_targets() -> list[_Target]:
    """What there is to replace in the vLLM that is installed.

    Raises:
        UnsupportedVllmError: its version or a signature is not the known one.
        ImportError: there is none.
    """
    check_version(installed_version(), import_module("vllm").__version__)
    v2 = _target(_V2_MODULE, "BlockTables", FusedBlockTables)
    check_methods(v2.stock, BLOCK_TABLES)
    if util.find_spec(_ASCEND_PACKAGE) is not None:
        # Its class derives from vLLM's, which therefore stays; its v1 runner has its own tables.
        ascend = _target(_ASCEND_MODULE, "AscendBlockTables", FusedAscendBlockTables)
        check_ascend(ascend.stock)
        return [ascend]
    v1 = _target(_V1_MODULE, "MultiGroupBlockTable", MultiGroupBlockTable)
    check_methods(v1.stock, MULTI_GROUP_BLOCK_TABLE)
    return [v2, v1]


def _target(module_name: str, name: str, stand_in: FallsBack) -> _Target:
    module = import_module(module_name)
    return _Target(module, name, PATCHES.original(module, name), stand_in)


def _install() -> str:
    targets = _find_targets()
    for target in targets:
        target.stand_in.stock = target.stock
        for module in target.readers:
            PATCHES.put(module, target.name, target.stand_in)
    on_ascend = targets[0].stand_in is FusedAscendBlockTables
    if on_ascend:
        # vllm-ascend binds its class to the runner's name for vLLM's; whichever came first.
        runner = sys.modules.get(_V2_READER)
        if runner is not None:
            PATCHES.put(runner, "BlockTables", FusedAscendBlockTables)
    if env.VLLM_MAMBA.read() == "none":
        spec = import_module("vllm.v1.kv_cache_interface").MambaSpec
        PATCHES.put(spec, "uses_slot_mapping", property(lambda self: False))
    wrap_model_runner()
    return "in the place of " + " and ".join(
        f"{target.module.__name__}.{target.name}" for target in targets
    )


def _restore() -> None:
    PATCHES.restore()
    for stand_in in (FusedBlockTables, FusedAscendBlockTables, MultiGroupBlockTable):
        stand_in.stock = None


def _report(new: PluginStatus) -> None:
    """Keep the status; one log line for each outcome, not for each call."""
    global _status
    said, _status = (_status.active, _status.reason), new
    if said == (new.active, new.reason):
        return
    log: Callable[..., Any] = logger.info if new.active or new.mode == "off" else logger.warning
    log("fused_slots block tables are %s: %s", "active" if new.active else "inactive", new.reason)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BlockTableError) else f"{type(error).__name__}: {error}"
