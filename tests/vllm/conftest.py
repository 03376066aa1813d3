"""vLLM 0.33.0 on a CPU machine: its Triton kernels run in the interpreter, on plain buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.update(
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    VLLM_TARGET_DEVICE="cpu",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_PLUGINS="",
)

# Plain buffers in place of pinned ones; must come before any runner module is imported.
import vllm.v1.worker.cpu.shm  # noqa: F401

from fused_slots.vllm import plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="ten times the random steps (tens of minutes)"
    )


@pytest.fixture
def num_lives(request: pytest.FixtureRequest) -> int:
    """How many random lives a comparison runs."""
    return 250 if request.config.getoption("--long") else 25


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM with our tables in the place of its own."""
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "strict")
    plugin.register()
    yield
    # What the test put over our names goes first: undone later, it would bring them back.
    monkeypatch.undo()
    plugin.unregister()
