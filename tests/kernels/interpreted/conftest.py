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
from tests.kernels.checked_memory import CheckedMemory


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckedMemory]:
    """Watched memory, and the interpreter behind every manager on the CPU."""
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "interpreter")
    with CheckedMemory(seed=1) as memory:
        yield memory


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered columns are shared by two programs where a GPU would take up to sixteen."""
    monkeypatch.setattr(launch_plan, "MAX_HELPERS", 2)


@pytest.fixture(params=["auto", "by_request"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """FUSED_SLOTS_PLAN, each of its values."""
    monkeypatch.setenv("FUSED_SLOTS_PLAN", request.param)
    value: str = request.param
    return value
