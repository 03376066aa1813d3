"""Other Pythons than the one that runs the tests: types, syntax, and both host halves.

The native half is built once against the stable interface of 3.11, so it loads under every later
release; 3.10 has the half in Python. Free-threaded builds are not tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.pythons.interpreters import MINORS, interpreter

ROOT = Path(__file__).parents[2]
FOUND = [minor for minor in MINORS if interpreter(minor)]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("minor", [minor for minor in MINORS if minor != sys.version_info[1]])
def test_types_hold_for_each_python(minor: int) -> None:
    run(sys.executable, "-m", "mypy", "--python-version", f"3.{minor}",
        "--cache-dir", f".cache/mypy-3.{minor}")  # fmt: skip


@pytest.mark.parametrize("minor", MINORS)
def test_syntax_and_names_are_those_of_each_python(minor: int) -> None:
    run(sys.executable, "-m", "ruff", "check", "--select", "E9,F,UP036",
        "--target-version", f"py3{minor}", "fused_slots", "bench")  # fmt: skip


@cache
def numpy_for(minor: int) -> str:
    """A folder with NumPy for an interpreter; it is kept between runs."""
    folder = ROOT / ".cache" / f"numpy-3.{minor}"
    if not (folder / "numpy").is_dir():
        python = interpreter(minor)
        assert python
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--only-binary", ":all:", "--target", str(folder), "numpy<2.4")  # fmt: skip
    return str(folder)


@cache
def digest(minor: int, half: str) -> str:
    python = interpreter(minor)
    assert python
    script = str(ROOT / "tests" / "pythons" / "host_rows.py")
    return run(python, "-P" if minor > 10 else "-s", script, half, PYTHONPATH=numpy_for(minor))


def test_another_python_than_the_one_of_the_tests_is_here() -> None:
    """Otherwise the next test would say nothing."""
    assert set(FOUND) - {sys.version_info[1]}


@pytest.mark.parametrize("minor", FOUND)
def test_both_host_halves_do_the_same_under_each_python(minor: int) -> None:
    expected = digest(11, "python")
    assert digest(minor, "python") == expected
    if minor >= 11:
        assert digest(minor, "native") == expected
