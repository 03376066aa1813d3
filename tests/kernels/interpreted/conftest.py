"""Every test of this folder runs interpreted kernels in watched memory.

Triton decides when a kernel is defined whether it is interpreted, so these tests need a process of
their own with TRITON_INTERPRET=1; `make test-interpreted` starts it, as `make test` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("set TRITON_INTERPRET=1, or use `make test-interpreted`")

from fused_slots import plan as launch_plan
from tests.backends_under_test import MakeTables
from tests.kernels.checked_memory import CheckedMemory


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckedMemory]:
    """Watched memory, and the interpreter behind every manager on the CPU."""
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "interpreter")
    with CheckedMemory(seed=1) as memory:
        yield memory


SMALL_TILES = {
    "TILE": 16, "STEP_TILE": 8, "REQUEST_TILE": 4, "PAD_TILE": 16, "MAX_PAD_PROGRAMS": 2,
    "ENTRIES": 4, "COLUMNS": 8, "STRETCH": 8, "STRETCH_COST": 4, "PART": 4, "LONG": 8,
    "HELPERS": (2, 2),
    "CHUNK": 16, "RECORDS": 4, "MAX_TILES": 64, "MAX_WRITERS": 8,
}  # fmt: skip
"""Sizes at which a few tokens, rows and columns cross every border there is."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with the smallest tiles, so that small tables need many programs."""
    for name, size in SMALL_TILES.items():
        monkeypatch.setattr(launch_plan, name, size)


@pytest.fixture(params=["auto", "by_request"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """FUSED_SLOTS_PLAN, each of its values."""
    monkeypatch.setenv("FUSED_SLOTS_PLAN", request.param)
    value: str = request.param
    return value


@pytest.fixture
def make_tables() -> MakeTables:
    """Managers whose kernels are interpreted."""
    return MakeTables("cpu", "interpreter")
