"""All parts by name; __main__ holds their order and time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.ascend_first_run import hardware, managers
from bench.ascend_first_run.device import Device
from bench.ascend_first_run.note import Note

PARTS: dict[str, Callable[[Device, Note], dict[str, Any]]] = {
    part.__name__: part
    for part in (
        managers.machine, hardware.words, hardware.lines, hardware.cache, hardware.events,
        hardware.modes, managers.lives, managers.graphs, hardware.dealing, hardware.latencies,
        managers.kernels, managers.public, managers.profiler, managers.random,
    )
}  # fmt: skip
