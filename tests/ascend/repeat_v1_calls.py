"""Repeat an input batch's calls of vllm-ascend's v1 tables on code compiled for Ascend.

`python repeat_v1_calls.py FILE...` with the source tree on the path: files of
tests/releases/ascend_calls.py, whose slots were equal to those of vllm-ascend's own tables, in turn
on the two targets. Prints how many calls were repeated and slots compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compile import ASCEND_910B3, ASCEND_950
from hivm_backend import executed_on

from fused_slots.vllm import ascend_v1

TARGETS = (ASCEND_910B3, ASCEND_950)


def repeat(path: Path, target: str) -> tuple[int, int]:
    """Calls and slots compared."""
    table_class, specs, arguments, *calls = json.loads(path.read_text())
    groups = [SimpleNamespace(kv_cache_spec=type(name, (), {})()) for name in specs]
    with executed_on(target):
        tables: Any = getattr(ascend_v1, table_class)(
            **arguments, device=torch.device("cpu"), kv_cache_groups=groups
        )
    manager = tables._storage.manager
    executed = manager._backend.launcher.executions
    num_slots = 0
    for number, (name, values, expected) in enumerate(calls):
        if name == "compute_slot_mapping":
            num_reqs, starts, positions = values
            values = [
                *(num_reqs, torch.tensor(starts, dtype=torch.int32)),
                torch.tensor(positions, dtype=torch.int64),
            ]
        launches = manager.launches
        executed.clear()
        getattr(tables, name)(*values)
        # All groups' slots are one launch, and nothing else is any.
        assert manager.launches - launches == bool(expected), (number, name)
        assert bool(executed) == bool(expected), (number, name)
        for g, slots in enumerate(expected):
            assert tables[g].slot_mapping.gpu.tolist() == slots, (number, name, g)
            num_slots += len(slots)
    return len(calls), num_slots


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[1:]):
        target = TARGETS[number % len(TARGETS)]
        print(Path(name).stem, target, *repeat(Path(name), target), sep="; ")
