"""Counts that depend on no machine, compared exactly with recorded_counts.json by test_counts.py.

    make record-counts        # after a change that is meant

What is imported, launches and torch operations of each call, variants of each configuration, and
the package's lines. Compiled kernels' numbers are in kernels/recorded/, Ascend's in ascend/*.json.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends.launch import Launch, Launcher
from fused_slots.backends.pinned import RING_SIZE, PinnedRing
from tests.backends_under_test import MakeTables

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("recorded_counts.json")
GROUPS = (KVCacheGroup(16, 64), KVCacheGroup(32, 64, 16, sliding_window_reach=20))

LOADED = """
import sys
before = set(sys.modules)
{script}
print(*(m for m in set(sys.modules) - before if m.split(".")[0] not in sys.stdlib_module_names))
"""
IMPORTS = {
    "import fused_slots": "import fused_slots",
    "a first manager and its step, beyond torch": """
import numpy, torch
before = set(sys.modules)
import fused_slots
tables = fused_slots.AscendBlockTables.from_groups(
    [fused_slots.KVCacheGroup(16, 8)], max_num_reqs=2, max_num_batched_tokens=4)
tables.append_block_ids(0, [[1]], overwrite=True)
tables.step(torch.zeros(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64))
""",
}


def imported(script: str) -> list[str]:
    """The package's modules that a fresh process loads; of others the top-level names.

    Without `coverage`, which measures the processes of tests too.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(script=script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    names = done.stdout.split()
    others = {name.split(".")[0] for name in names} - {"fused_slots", "coverage"}
    return sorted(others) + sorted(name for name in names if name.startswith("fused_slots"))


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do; each operation that makes a tensor allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Unlaunched(Launcher):
    """Launches nothing and counts how often it would have."""

    launched = compiled = 0

    def prepare(self, *variant: Any) -> Launch:
        self.compiled += 1

        def launch(programs: int, tensors: Any, numbers: Any) -> None:
            self.launched += 1

        return launch


def calls(tables: AscendBlockTables) -> dict[str, Callable[[], Any]]:
    """Every call of a step, its batch the same each time."""
    index = torch.arange(3, dtype=torch.int32)
    batch = (index, torch.arange(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))

    def step_with_writes() -> None:
        for row in range(3):
            tables.append_block_ids(row, [[1], [1]], overwrite=True)
        tables.step(*batch)

    return {
        "step": lambda: tables.step(*batch),
        "step with three appends": step_with_writes,
        "compute_slot_mappings": lambda: tables.compute_slot_mappings(*batch, 3),
        "gather_block_tables": lambda: tables.gather_block_tables(index, 3),
        "map_tokens": lambda: tables.map_tokens(index, batch[2]),
    }


def steady(tables: AscendBlockTables, launcher: Unlaunched | None) -> dict[str, Any]:
    """Of each call, when it has been made before: launches, torch's operations, kept blocks."""
    found = {}
    for name, call in calls(tables).items():
        for _ in range(RING_SIZE + 1):  # each place of the ring is made when it is first used
            call()
        launches, launched = tables.launches, launcher.launched if launcher else 0
        with Operations() as operations:
            call()
        found[name] = {
            "launches": tables.launches - launches,
            "torch operations": dict(sorted(operations.counted.items())),
        }
        if launcher:
            found[name]["kernels launched"] = launcher.launched - launched
    return found


def per_call() -> dict[str, Any]:
    """Both kinds of backend: NumPy on the CPU, and what a GPU's host does."""
    from tests.kernels.offline import make_offline

    ring = partial(PinnedRing, torch.device("cpu"), new_event=mock.Mock, on_device=nullcontext)
    with mock.patch("tests.kernels.offline.HostPackets", ring):
        device = make_offline(Unlaunched, GROUPS)
        launcher: Any = device._backend.launcher
        return {
            "cpu": steady(MakeTables("cpu")(GROUPS), None),
            "gpu": steady(device, launcher),
        }


def variants() -> dict[str, int]:
    """How many variants each configuration is warmed up with."""
    from tests.kernels.offline import make_offline
    from tests.kernels.resources import CONFIGURATIONS

    counted = {}
    for name, settings in CONFIGURATIONS.items():
        plan = "by_request" if name == "by request" else "auto"
        with mock.patch.dict("os.environ", {"FUSED_SLOTS_PLAN": plan}):
            counted[name] = len(make_offline(Unlaunched, **settings).warmup().variants)
    return counted


def lines(package: Path = ROOT / "fused_slots") -> int:
    """Lines of Python that hold code: without blanks, comments and docstrings."""
    return sum(len(code_lines(path.read_text())) for path in package.rglob("*.py"))


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*ignored, tokenize.ENDMARKER):
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def counts() -> dict[str, Any]:
    """All of them, in the record's form."""
    return {
        "imports": {name: imported(script) for name, script in IMPORTS.items()},
        "calls": per_call(),
        "variants": variants(),
        "lines": lines(),
    }


def moved(record: Any, found: Any, name: str = "") -> list[str]:
    """What differs, by name."""
    if isinstance(record, dict) and isinstance(found, dict):
        keys = [*record, *(key for key in found if key not in record)]
        return [
            difference
            for key in keys
            for difference in moved(record.get(key), found.get(key), f"{name}{key}: ")
        ]
    if isinstance(record, list) and isinstance(found, list):
        gone, new = sorted({*record} - {*found}), sorted({*found} - {*record})
        return [f"{name}- {each}" for each in gone] + [f"{name}+ {each}" for each in new]
    return [] if record == found else [f"{name}{record} -> {found}"]


def main() -> None:
    found = counts()
    if RECORD.exists():
        print("\n".join(moved(json.loads(RECORD.read_text()), found)) or "nothing moved")
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
