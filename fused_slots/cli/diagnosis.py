"""Is this machine fit to run: versions, backends that work, settings, and what to fix."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata

import torch

import fused_slots
from fused_slots import env
from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import BlockTableError
from fused_slots.groups import KVCacheGroup
from fused_slots.host.rows import NATIVE, host_half
from fused_slots.reference import map_token
from fused_slots.vllm.plugin import status
from fused_slots.vllm.report import EngineReport, engine_report

PACKAGES = ("torch", "numpy", "triton", "triton-ascend", "torch-npu", "vllm", "vllm-ascend")
DEVICES = ("cpu", "cuda", "npu")
MISSING = "not installed"


@dataclass(frozen=True)
class Diagnosis:
    """What was found; `problems` says what is wrong and how to fix it, empty = nothing."""

    versions: dict[str, str]
    backends: dict[str, str]
    staging: str
    vllm_plugin: str
    engine: EngineReport
    environment: dict[str, str]
    problems: list[str]


def diagnose() -> Diagnosis:
    """Look at the packages, map a token on every device, read the settings."""
    problems: list[str] = []
    versions = {"fused_slots": fused_slots.__version__, "python": platform.python_version()}
    versions.update({package: installed_version(package) for package in PACKAGES})
    environment = {}
    for variable in env.VARIABLES:
        try:
            environment[variable.name] = variable.read() or "(not set)"
        except BlockTableError as error:
            environment[variable.name] = "(bad value)"
            problems.append(f"{error}. Change or unset it")
    problems += unknown_variables(os.environ)
    backends = {device: _try_device(device) for device in DEVICES}
    if backends["cpu"] != "works":
        problems.append(f"The CPU backend does not work: {backends['cpu']}")
    problems += package_problems(versions, torch.cuda.is_available())
    engine = engine_report()
    if engine.releases and engine.obstacle and not engine.off:
        problems.append(f"The vLLM plugin stays off. {engine.obstacle}")
    return Diagnosis(
        *(versions, backends, _staging_half(), plugin_state(engine), engine),
        *(environment, problems),
    )


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """What begins as our variables do and is none of them, with the one that may be meant."""
    prefix = "FUSED_SLOTS_"
    known = [variable.name.removeprefix(prefix) for variable in env.VARIABLES]
    ours = {name.removeprefix(prefix) for name in environment if name.startswith(prefix)}
    problems = []
    for name in sorted(ours.difference(known)):
        meant = get_close_matches(name, known, n=1)
        question = f"; did you mean {prefix}{meant[0]}?" if meant else ""
        problems.append(f"{prefix}{name} is set, but no variable of that name is read{question}")
    return problems


def plugin_state(engine: EngineReport) -> str:
    """What the vLLM plugin does in this process, or what it would do and why."""
    if status().active:
        return f"active: {status().reason}"
    if not engine.releases:
        return engine.obstacle
    return f"stays off: {engine.obstacle}" if engine.obstacle else "becomes active when vLLM starts"


def package_problems(versions: dict[str, str], has_cuda_device: bool) -> list[str]:
    """Combinations of packages that are known not to work.

    Args:
        versions: package name to version, or `MISSING`.
        has_cuda_device: whether torch sees a CUDA device.
    """
    found = {package for package, version in versions.items() if version != MISSING}
    problems = []
    if {"triton", "triton-ascend"} <= found:
        problems.append(
            "triton and triton-ascend are both installed, but both own the module `triton`; "
            "uninstall the one that this machine's device does not need, then reinstall the other"
        )
    if has_cuda_device and not found & {"triton", "triton-ascend"}:
        problems.append("There is a CUDA device but no triton: pip install triton")
    if "torch-npu" in found and "triton-ascend" not in found:
        problems.append("There is torch-npu but no triton-ascend: pip install triton-ascend")
    if versions.get("triton", "").startswith("3.6.") and _version(versions["numpy"]) >= (2, 4):
        problems.append(
            f"numpy {versions['numpy']} breaks the interpreter of triton 3.6 "
            "(TRITON_INTERPRET=1): pip install 'numpy<2.4'"
        )
    return problems


def installed_version(package: str) -> str:
    """A package's version from its metadata, without importing it; `MISSING` when absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _staging_half() -> str:
    """Where appends are staged, and why there."""
    try:
        half = host_half()
    except BlockTableError as error:
        return f"not usable: {error}"
    return half if NATIVE else f"{half} (the native half was not compiled)"


def _try_device(device: str) -> str:
    """Map one token on a device and compare it with the reference."""
    group = KVCacheGroup(block_size=16, max_num_blocks=2)
    try:
        tables = AscendBlockTables.from_groups(
            [group], max_num_reqs=1, max_num_batched_tokens=4, device=device
        )
        tables.append_block_ids(0, ([3, 5],), overwrite=True)
        # Without a driver or a plugin for it, torch refuses the device with one of these.
        _, slots = tables.step(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([17], dtype=torch.int64, device=device),
        )
        slot, expected = int(slots[0, 0]), map_token(group, [3, 5], 17).slot
    except (BlockTableError, RuntimeError, AssertionError, ImportError) as error:
        return f"not usable: {str(error).splitlines()[0]}"
    return "works" if slot == expected else f"WRONG: slot {slot}, expected {expected}"


def _version(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
