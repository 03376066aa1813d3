"""The engines' releases as their Python files alone, in a cache folder beside the source tree.

python tests/releases/releases.py        fetches those that are missing, two at a time
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fused_slots.vllm.releases.vllm import CONTRACTS

CACHE = Path(__file__).parents[2] / ".cache" / "releases"
LOCKSTEP = ("0.33.0", "0.32.0", "0.30.0", "0.28.0", "0.25.1")
"""Releases that are run; of all others the signatures are compared."""
VERSIONS = tuple(version for contract in CONTRACTS for version in contract.releases["vllm"])
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 31, 28, 17)] + ["manylinux2014_x86_64"]


def folder_of(distribution: str, version: str) -> Path:
    """Where a release is, or will be."""
    return CACHE / f"{distribution}-{version}"


def fetch(distribution: str, version: str) -> Path:
    """A release's folder; its wheel is downloaded, its Python files kept."""
    folder = folder_of(distribution, version)
    if folder.is_dir():
        return folder
    wheels, unpacked = folder.with_suffix(".wheel"), folder.with_suffix(".part")
    for leftover in (wheels, unpacked):
        shutil.rmtree(leftover, ignore_errors=True)
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--python-version", "3.12", *platforms),
            *("--dest", str(wheels), f"{distribution}=={version}"),
        ],
        check=True,
    )
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, unpacked)
    shutil.rmtree(wheels)
    unpacked.rename(folder)
    return folder


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as threads:
        for folder in threads.map(lambda version: fetch("vllm", version), VERSIONS):
            print(folder)
