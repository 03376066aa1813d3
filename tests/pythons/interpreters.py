"""Python interpreters of other releases on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

MINORS = (10, 11, 12, 13, 14)
"""Of the Python releases that pyproject.toml admits and the index serves."""


@cache
def interpreter(minor: int) -> str | None:
    """An interpreter that is python3.MINOR, on PATH or under pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    installed = sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))
    on_path = shutil.which(f"python3.{minor}")
    for candidate in [*map(str, installed), *([on_path] if on_path else [])]:
        done = subprocess.run(
            [candidate, "-c", "import ssl, sys; print(sys.version_info[1])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == str(minor):
            return candidate
    return None
