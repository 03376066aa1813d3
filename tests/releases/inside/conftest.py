"""Tests that run inside a release of vLLM: its Python alone, Triton's kernels interpreted."""

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
    FUSED_SLOTS_VLLM="strict",
)
os.environ.pop("VLLM_PLUGINS", None)

# Plain buffers in place of pinned ones; must come before any runner module is imported.
import vllm.v1.worker.cpu.shm  # noqa: F401

from fused_slots.vllm import plugin


@pytest.fixture
def plugged_in() -> Iterator[None]:
    """The release with our tables in the place of its own."""
    plugin.register()
    yield
    plugin.unregister()
