"""What a wheel and an sdist must hold: the tracked files that belong in them, by name.

    python -m tests.artefacts.contents WHEEL... SDIST
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
NATIVE = "fused_slots/host/_staging.abi3.so"
OF_ONE_PYTHON = re.compile(r"fused_slots/host/_staging\.cpython-[\w-]+\.so")
"""What 3.10 and free-threaded builds, which have no limited API, compile instead."""
SOURCE = "fused_slots/host/_staging.c"
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
GENERATED = {"PKG-INFO", "setup.cfg"}
MAX_WHEEL_BYTES = 700_000
"""More than nine tenths of it are the shipped recordings."""


def tracked() -> set[str]:
    """Files of the checkout, in commits or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def wheel_differences(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """A wheel has the package's files, compiled where they are C, and its own metadata."""
    package = {name for name in files if name.startswith("fused_slots/")}
    found = {name for name in names if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    native = next(filter(OF_ONE_PYTHON.fullmatch, sorted(found)), NATIVE)
    metadata = {name.split("/", 1)[1] for name in set(names) - found}
    return _differences("wheel", package - {SOURCE} | {native}, found) + _differences(
        "wheel's metadata", METADATA, metadata
    )


def sdist_differences(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """An sdist has what a checkout has, and what setuptools writes."""
    inside = {name.split("/", 1)[1] for name in names if "/" in name}
    found = {
        name
        for name in inside - GENERATED
        if not PurePosixPath(name).parts[0].endswith(".egg-info")
    }
    return _differences("sdist", set(files), found)


def _names(wheel: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [member.filename for member in archive.infolist() if not member.is_dir()]


def _differences(what: str, expected: set[str], found: set[str]) -> list[str]:
    missing = [f"{what}: {name} is missing" for name in sorted(expected - found)]
    return missing + [f"{what}: {name} does not belong there" for name in sorted(found - expected)]


def main(paths: list[str]) -> int:
    files, differences = tracked(), []
    for path in paths:
        if path.endswith(".whl"):
            differences += wheel_differences(_names(path), files)
            size = Path(path).stat().st_size
            if size > MAX_WHEEL_BYTES:
                differences.append(f"{path}: {size} bytes, more than {MAX_WHEEL_BYTES}")
        else:
            with tarfile.open(path) as sdist:
                members = [member.name for member in sdist if member.isfile()]
            differences += sdist_differences(members, files)
    print("\n".join(differences) or f"wheel and sdist: {len(paths)} with what belongs in them")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
