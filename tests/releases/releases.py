"""The engines' releases as their Python files alone, in a cache folder beside the source tree.

vllm-ascend's newest have no wheel: of those the source archive is fetched, which pip does not do
without asking it for its metadata; for that its setup needs setuptools-scm and a device's name.

python tests/releases/releases.py        fetches those that are missing, two at a time
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fused_slots.vllm.releases.vllm import CONTRACTS

CACHE = Path(__file__).parents[2] / ".cache" / "releases"
LOCKSTEP = ("0.33.0", "0.32.0", "0.30.0", "0.28.0", "0.25.1")
"""Releases that are run; of all others the signatures are compared."""
VERSIONS = tuple(version for contract in CONTRACTS for version in contract.releases["vllm"])
ASCEND = {"0.23.0.post1": "0.23.0", "0.30.0rc2": "0.30.0"}
"""vllm-ascend's releases that are run, and the vllm of each."""
GGUF = ("gguf", "0.17.1")
"""What vllm 0.23 imports and the others do not."""
BUILD_TOOL = ("setuptools-scm", "8.3.1")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 31, 28, 17)] + ["manylinux2014_x86_64"]


def folder_of(distribution: str, version: str) -> Path:
    """Where a release is, or will be."""
    return CACHE / f"{distribution}-{version}"


def fetch(distribution: str, version: str) -> Path:
    """A release's folder; its wheel is downloaded, its Python files kept."""
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    options = ["--only-binary", ":all:", "--python-version", "3.12", *platforms]
    return _fetch(distribution, version, options, {})


def fetch_source(distribution: str, version: str) -> Path:
    """The same from a source archive; it is asked for its metadata, nothing is built."""
    build = {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}
    build["PYTHONPATH"] = str(fetch(*BUILD_TOOL))
    folder = _fetch(distribution, version, ["--no-binary", ":all:", "--no-build-isolation"], build)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    lines = ("Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}", "")
    (info / "METADATA").write_text("\n".join(lines))
    return folder


def _fetch(distribution: str, version: str, options: list[str], variables: dict[str, str]) -> Path:
    folder = folder_of(distribution, version)
    if folder.is_dir():
        return folder
    archives, unpacked = (folder.with_name(folder.name + end) for end in (".archive", ".part"))
    for leftover in (archives, unpacked):
        shutil.rmtree(leftover, ignore_errors=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options),
            *("--dest", str(archives), f"{distribution}=={version}"),
        ],
        env=os.environ | variables,
        check=True,
    )
    (archive,) = archives.iterdir()
    _unpack(archive, unpacked, distribution.replace("-", "_"))
    shutil.rmtree(archives)
    unpacked.rename(folder)
    return folder


def _unpack(archive: Path, folder: Path, package: str) -> None:
    """The Python files of a package, and its metadata where a wheel has it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    wheel.extract(name, folder)
        return
    with tarfile.open(archive) as source:
        for member in source:
            name = member.name.partition("/")[2]
            if name.startswith(f"{package}/") and name.endswith(".py"):
                member.name = name
                source.extract(member, folder, filter="data")


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as threads:
        for folder in threads.map(lambda version: fetch("vllm", version), VERSIONS):
            print(folder)
    for version in ASCEND:
        print(fetch_source("vllm-ascend", version))
    print(fetch(*GGUF))
