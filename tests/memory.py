"""What a process and a manager hold: for tests and soaks in which nothing may grow."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

CONTAINERS = (list, tuple, set, frozenset)


def resident_kib() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


class Kept(NamedTuple):
    """What objects of the package hold."""

    entries: int
    """Of dicts, lists, tuples, sets and arrays."""
    tensor_bytes: int
    """Of tensors and NumPy arrays; memory that several share counts once."""


def kept_by(*owners: object) -> Kept:
    """Everything that can be reached from these objects through the package's own."""
    entries, buffers, seen = 0, {}, set()
    waiting: list[object] = list(owners)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, np.ndarray):
            base = thing
            while isinstance(base.base, np.ndarray):
                base = base.base
            buffers[base.ctypes.data] = base.nbytes
        elif isinstance(thing, dict):
            entries += len(thing)
            waiting += [*thing, *thing.values()]
        elif isinstance(thing, CONTAINERS):
            entries += len(thing)
            waiting += thing
        elif isinstance(thing, (array, bytearray)):
            entries += len(thing)
        elif type(thing).__module__.startswith("fused_slots") and not isinstance(thing, type):
            waiting.append(getattr(thing, "__dict__", {}))
    return Kept(entries, sum(buffers.values()))
