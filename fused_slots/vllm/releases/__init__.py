"""The engines' releases that the plugin knows, one contract a release line, and which is here."""

from __future__ import annotations

import sys
from importlib import import_module, metadata, util

from fused_slots.vllm.releases.contract import Contract, UnsupportedVllmError
from fused_slots.vllm.releases.vllm import CONTRACTS as VLLM_CONTRACTS
from fused_slots.vllm.releases.vllm_ascend import CONTRACTS as ASCEND_CONTRACTS

CONTRACTS = (*VLLM_CONTRACTS, *ASCEND_CONTRACTS)
DISTRIBUTIONS = ("vllm", "vllm-ascend")


def installed_versions() -> dict[str, str]:
    """The version of each engine distribution that is installed; empty where it has none."""
    found = {}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            if _is_importable(distribution.replace("-", "_")):
                found[distribution] = ""
    return found


def find_contract(installed: dict[str, str]) -> Contract:
    """The contract of the engine that is installed, by its versions.

    Its signatures are looked at by whoever imports its modules.

    Raises:
        UnsupportedVllmError: no contract has these versions; names them and those known.
    """
    for contract in CONTRACTS:
        if contract.fits(installed):
            return contract
    engine = "vllm-ascend" if "vllm-ascend" in installed else "vllm"
    known = [
        " with ".join(f"{name} {', '.join(versions)}" for name, versions in c.releases.items())
        for c in CONTRACTS
        if engine in c.releases and len(c.releases) == len(installed or {"vllm": ""})
    ]
    raise UnsupportedVllmError(
        engine,
        expected=f"one of the releases {'; '.join(known)}",
        actual=" with ".join(f"{name} {v or 'of no version'}" for name, v in installed.items())
        or "none installed",
        hint="fused_slots replaces nothing in a release that it does not know; install one that "
        "it does, or look for a newer fused_slots",
    )


def check_module_version(installed: dict[str, str]) -> None:
    """Check that the vllm that is imported is the one whose distribution is installed.

    Raises:
        UnsupportedVllmError: its module says another version.
    """
    module = import_module("vllm").__version__
    if module.split("+")[0] != installed["vllm"].split("+")[0]:
        raise UnsupportedVllmError(
            "vllm.__version__",
            expected=f"{installed['vllm']}, as its distribution says",
            actual=module,
            hint="Two copies of vllm are on the path; remove one",
        )


def _is_importable(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return util.find_spec(package) is not None
