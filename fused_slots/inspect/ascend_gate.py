"""Does every kernel variant compile for Ascend, without an NPU: the gate of tests/ascend."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

GATE = Path(__file__).resolve().parents[2] / "tests" / "ascend" / "test_gate.py"
COMPILER = "ascendnpuir"
"""The package that holds Ascend's compiler."""


@dataclass(frozen=True)
class Gate:
    """Whether the gate passed, and its last words or why it could not run."""

    passed: bool
    report: str


def run_ascend_gate() -> Gate:
    """Compile every variant and compare its costs with their budgets; takes minutes."""
    if not GATE.exists():
        return Gate(False, "not run: it needs the source tree (tests/ascend)")
    if find_spec(COMPILER) is None:
        return Gate(
            False,
            "not run: triton-ascend and ascendnpu-ir are not in this environment; "
            "`make test-ascend` makes one that has them",
        )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(GATE)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
    return Gate(done.returncode == 0, "\n  ".join([*failed, *lines[-1:]]))
