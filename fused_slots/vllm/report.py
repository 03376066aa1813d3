"""The engine at hand, for `fused-slots doctor`: its release, its runner, what would be replaced."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from fused_slots import env
from fused_slots.faults import BlockTableError
from fused_slots.vllm.plugin import find_obstacle, runner_in_use, status
from fused_slots.vllm.releases import find_contract, installed_versions


@dataclass(frozen=True)
class EngineReport:
    """What was found.

    Attributes:
        releases: versions by distribution; empty without an engine.
        contract: the release line that these versions are; empty where it is no known one.
        runner: the model runner that runs, and why, as far as the environment says.
        replaces: the classes that the plugin stands in for.
        obstacle: what stands in the way, in a sentence that says what to do; empty = nothing.
        off: FUSED_SLOTS_VLLM=off was asked for.
    """

    releases: dict[str, str]
    contract: str = ""
    runner: str = ""
    replaces: tuple[str, ...] = ()
    obstacle: str = ""
    off: bool = False


def engine_report() -> EngineReport:
    """Look at the engine that is installed; imports it and changes nothing."""
    releases = installed_versions()
    if not releases:
        return EngineReport(releases, obstacle="vllm is not installed")
    obstacle = ""
    if not status().active:
        with redirect_stdout(sys.stderr):  # where vLLM then sends its log, too
            obstacle = find_obstacle()
    try:
        off = env.VLLM.read() == "off"
        contract = find_contract(releases)
    except BlockTableError as error:
        return EngineReport(releases, obstacle=obstacle or str(error))
    return EngineReport(
        releases,
        contract.name,
        runner_in_use(contract),
        tuple(tables.path for tables in contract.tables),
        obstacle,
        off,
    )
