"""The recordings that ship with the package, from vLLM's own scheduler: their names and bytes."""

from __future__ import annotations

from importlib import resources

SUFFIX = ".npz.xz"

DEFAULT_RECORDING = "async_speculative"
"""Two batches in flight, rejected drafts, prefix hits, preemption, Mamba in align mode."""


def list_recordings() -> tuple[str, ...]:
    """Names of the schedules that ship with the package."""
    files = (file.name for file in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)))


def read_recording(name: str) -> bytes:
    """The bytes of one of them."""
    return (resources.files(__name__) / f"{name}{SUFFIX}").read_bytes()
