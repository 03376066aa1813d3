"""vLLM's entry point: puts this package's block tables in the place of the engine's.

vLLM calls `register` in every process, often more than once, and does not guard the call. What
does not fit leaves everything as it was, with one line that says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from fused_slots import env
from fused_slots.faults import BlockTableError
from fused_slots.logs import follow, logger
from fused_slots.vllm.fallback import FallsBack
from fused_slots.vllm.late_import import LateImports
from fused_slots.vllm.one_launch import check_runners, wrap_loaded_runners, wrap_runners
from fused_slots.vllm.patches import PATCHES
from fused_slots.vllm.releases import check_module_version, find_contract, installed_versions
from fused_slots.vllm.releases.contract import (
    Contract,
    Tables,
    UnsupportedVllmError,
    check_methods,
)


@dataclass(frozen=True)
class PluginStatus:
    """What the plugin does in this process.

    Attributes:
        active: the engine would build this package's tables now.
        reason: one sentence, why or why not.
        mode: FUSED_SLOTS_VLLM.
        vllm_version: the distribution that is installed; empty without one.
        replaced: the engine's names that are ours now.
        contract: the release line that was taken; empty without one.
    """

    active: bool
    reason: str
    mode: str
    vllm_version: str
    replaced: tuple[str, ...] = ()
    contract: str = ""


_status = PluginStatus(False, "register was not called in this process", "", "")
_in_place: list[_Target] = []
"""What `register` has replaced in this process."""


def register() -> None:
    """Put our tables in the engine's place, or leave it alone and say why; any number of times.

    Raises:
        UnsupportedVllmError, ConfigurationError: only with FUSED_SLOTS_VLLM=strict; the engine
            that is installed does not fit.
    """
    mode, installed = "", installed_versions()
    follow("vllm.plugins.fused_slots")  # loggers outside of `vllm` have no handler in its workers
    try:
        mode = env.VLLM.read()
        if mode == "off":
            _restore()
            _report(PluginStatus(False, "FUSED_SLOTS_VLLM=off", mode, installed.get("vllm", "")))
            return
        contract, targets = _find_targets(installed)
        _install(contract, targets)
        _report(
            PluginStatus(
                *(True, _said(contract), mode, installed["vllm"], PATCHES.names, contract.name)
            )
        )
    except Exception as error:
        # Whatever it is, it must not keep vLLM from starting; unless it was asked to insist.
        _restore()
        _report(PluginStatus(False, _sentence(error), mode, installed.get("vllm", "")))
        if mode == "strict":
            raise


def unregister() -> None:
    """Give every name back to the engine; tables that were built already stay as they are."""
    global _status
    _restore()
    _status = PluginStatus(False, "unregistered", _status.mode, _status.vllm_version)


def status() -> PluginStatus:
    """What the engine would build in this process now, and why."""
    try:
        for target in _in_place:
            target.check_names()
        check_runners()
    except BlockTableError as error:
        return replace(_status, active=False, reason=_sentence(error), replaced=PATCHES.names)
    return _status


def find_obstacle() -> str:
    """Why `register` would stay off in this process, in a sentence; empty = it would be active.

    Imports vLLM and changes nothing.
    """
    try:
        if env.VLLM.read() == "off":
            return "FUSED_SLOTS_VLLM=off"
        _find_targets(installed_versions())
    except Exception as error:
        return _sentence(error)
    return ""


def runner_in_use(contract: Contract) -> str:
    """Which of the engine's model runners runs, and why, as far as the environment says."""
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    choice = os.environ.get(variable, "").strip()
    if choice in ("0", "1"):
        return f"{'v2' if choice == '1' else 'v1'} runner ({variable}={choice})"
    return f"v1 or v2 runner (by default {contract.default_runner})"


@dataclass(frozen=True)
class _Target:
    """A class to replace: what it is, what takes its place, and who names it."""

    tables: Tables
    packages: tuple[str, ...]
    stock: type
    stand_in: FallsBack

    def owners(self, value: type) -> Iterator[tuple[ModuleType, str]]:
        """Loaded modules of the engine that have `value` under the class's name or a builder's."""
        names = {self.tables.name, *(path.rpartition(".")[2] for path in self.tables.builders)}
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] in self.packages and module is not None:
                for name in sorted(names):
                    if vars(module).get(name) is value:
                        yield module, name

    def check_names(self) -> None:
        """Check that the engine builds its own class or ours, not somebody else's.

        Raises:
            UnsupportedVllmError: names whose it is.
        """
        for path in (self.tables.path, *self.tables.builders):
            module, _, name = path.rpartition(".")
            found = getattr(sys.modules.get(module), name, None)
            if found is not None and not self._is_known(found):
                raise UnsupportedVllmError(
                    path,
                    expected="the engine's own class",
                    actual=f"{found.__module__}.{found.__qualname__}",
                    hint="Another plug-in has replaced it; VLLM_PLUGINS selects which are loaded",
                )

    def _is_known(self, found: Any) -> bool:
        return _derives(found, self.stand_in) or found.__module__.split(".")[0] in self.packages


def _find_targets(installed: dict[str, str]) -> tuple[Contract, list[_Target]]:
    """What there is to replace in the engine that is installed.

    Raises:
        UnsupportedVllmError: its version or a signature is not a known one, or the class that it
            builds is another plug-in's.
        ImportError: it cannot be imported.
    """
    contract = find_contract(installed)
    check_module_version(installed)
    targets = []
    for tables in contract.tables:
        stand_in = tables.load_stand_in()
        if hasattr(stand_in, "check_engine"):
            stand_in.check_engine()
        if tables.waits and not _is_loaded(tables):
            continue
        module = import_module(tables.module)
        stock = PATCHES.original(module, tables.name)
        target = _Target(tables, contract.packages, stock, stand_in)
        target.check_names()
        check_methods(stock, tables.methods, contract.name)
        targets.append(target)
    check_runners(contract)
    return contract, targets


def _is_loaded(tables: Tables) -> bool:
    return hasattr(sys.modules.get(tables.module), tables.name)


def _install(contract: Contract, targets: list[_Target]) -> None:
    _in_place[:] = targets
    _late.wait_for({tables.module for tables in contract.tables if not _is_loaded(tables)})
    for target in targets:
        target.stand_in.stock = target.stock
        target.stand_in.arguments = target.tables.methods["__init__"]
        target.stand_in.built = wrap_loaded_runners
        for module, name in list(target.owners(target.stock)):
            PATCHES.put(module, name, target.stand_in)
        for path in target.tables.builders:
            # vllm-ascend binds its class to a name of vLLM's; whichever came first.
            module_name, _, name = path.rpartition(".")
            builder = sys.modules.get(module_name)
            if builder is not None and not _derives(vars(builder).get(name), target.stand_in):
                PATCHES.put(builder, name, target.stand_in)
    if env.VLLM_MAMBA.read() == "none":
        spec = import_module("vllm.v1.kv_cache_interface").MambaSpec
        if hasattr(spec, "uses_slot_mapping"):  # from vllm 0.30 on
            PATCHES.put(spec, "uses_slot_mapping", property(lambda self: False))
    wrap_runners(contract)


def _restore() -> None:
    _late.wait_for(set())
    PATCHES.restore()
    for target in _in_place:
        # A module that the engine imported after us took our class from the first one's name.
        for module, name in list(target.owners(target.stand_in)):
            setattr(module, name, target.stock)
        target.stand_in.stock = None
    _in_place.clear()
    wrap_runners(None)


def _derives(found: Any, stand_in: type) -> bool:
    return isinstance(found, type) and issubclass(found, stand_in)


def _said(contract: Contract) -> str:
    places = " and ".join(tables.path for tables in contract.tables)
    return f"{contract.name}, {runner_in_use(contract)}, in the place of {places}"


def _report(new: PluginStatus) -> None:
    """Keep the status; one log line for each outcome, not for each call."""
    global _status
    said, _status = (_status.active, _status.reason), new
    if said == (new.active, new.reason):
        return
    log: Callable[..., Any] = logger.info if new.active or new.mode == "off" else logger.warning
    log("fused_slots block tables are %s: %s", "active" if new.active else "inactive", new.reason)


_late = LateImports(register)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BlockTableError) else f"{type(error).__name__}: {error}"
