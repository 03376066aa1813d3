"""The linters' word on the package, as tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("ruff", "check", "--no-cache", "fused_slots"),
        ("ruff", "format", "--no-cache", "--check", "fused_slots"),
        ("mypy",),
    ],
    ids=["ruff check", "ruff format", "mypy strict"],
)
def test_package_is_clean(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_fit_a_hundred_columns_outside_the_linters_reach() -> None:
    for path in (ROOT / "tests").glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path}:{number}"
