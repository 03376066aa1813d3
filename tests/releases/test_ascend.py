"""vllm-ascend's releases at work: their input batch over stock and fused v1 tables in lockstep.

Each is run in a process of its own. The calls that it makes are then repeated on the code that is
compiled for Ascend, in the environment of tests/ascend.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_slots.vllm.releases import find_contract
from tests.releases.releases import ASCEND, GGUF, folder_of

ROOT = Path(__file__).parents[2]
ASCEND_PYTHON = ROOT / ".venv-ascend" / "bin" / "python"
NUM_STEPS = 200
DEFINED_IN = {
    "v1": "vllm_ascend/worker/block_table.py",
    "v2": "vllm_ascend/worker/v2/block_table.py",
}


@pytest.mark.parametrize("version", ASCEND)
def test_signatures_are_those_of_the_contract(version: str) -> None:
    contract = find_contract({"vllm": ASCEND[version], "vllm-ascend": version})
    assert {tables.runner for tables in contract.tables} >= {"v1"}
    for tables in contract.tables:
        tree = ast.parse(
            (folder_of("vllm-ascend", version) / DEFINED_IN[tables.runner]).read_text()
        )
        (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == tables.name)
        methods = {
            node.name: tuple(argument.arg for argument in node.args.args[1:])
            for node in found.body
            if isinstance(node, ast.FunctionDef)
        }
        # The v2 class inherits what it does not define.
        own = tables.methods if tables.runner == "v1" else methods.keys() & tables.methods.keys()
        assert {name: methods.get(name) for name in own} == {n: tables.methods[n] for n in own}


@pytest.mark.parametrize("version", ASCEND)
def test_rows_and_slots_are_the_releases_own_and_the_managers(version: str, tmp_path: Path) -> None:
    lines = output_of(
        [sys.executable, "-m", "tests.releases.ascend_lockstep", str(NUM_STEPS), str(tmp_path)],
        os.environ | {"PYTHONPATH": path_of(version)},
    )
    print(lines[-1])
    report = json.loads(lines[-1])
    assert report["contract"] == f"vllm-ascend {version[:4]}"
    assert report["torch_npu"] == []
    lives = report["counts"].pop("random lives")
    assert min(lives["paged slots"], lives.get("ring slots", 999)) > 200
    for counts in report["counts"].values():
        assert counts["steps"] >= NUM_STEPS
        assert min(counts["slots"], counts["draft slots"] * 10, counts["preempted"] * 1000) > 2000
    notes = sorted(map(str, tmp_path.glob("*.json")))
    assert len(notes) == len(report["counts"])
    repeated = output_of(
        [str(ASCEND_PYTHON), "tests/ascend/repeat_v1_calls.py", *notes],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    print(*repeated[-len(notes) :], sep="\n")
    for line in repeated[-len(notes) :]:
        calls, slots = map(int, line.split("; ")[-2:])
        assert calls > 2 * NUM_STEPS
        assert slots > 10_000


def test_the_v2_class_in_lockstep_under_vllms_runner() -> None:
    lines = output_of(
        [sys.executable, "-m", "tests.releases.ascend_v2"],
        os.environ | {"PYTHONPATH": path_of("0.30.0rc2")},
    )
    print(lines[-1])
    report = json.loads(lines[-1])
    assert (report["contract"], report["torch_npu"]) == ("vllm-ascend 0.30", [])
    (counts,) = report["counts"].values()
    assert counts["steps"] >= NUM_STEPS
    assert min(counts["preempted"], counts["prefix hits"])
    assert counts["slots"] >= counts["slots of the manager"] > 5000


def path_of(version: str) -> str:
    """Where Python finds this package's tests, a vllm-ascend and the vllm that it is for."""
    folders = (ROOT, folder_of("vllm", ASCEND[version]), folder_of("vllm-ascend", version))
    return os.pathsep.join(map(str, (*folders, folder_of(*GGUF))))


def output_of(command: list[str], variables: dict[str, str]) -> list[str]:
    """The lines that a process prints; it must succeed."""
    result = subprocess.run(
        command,
        env=variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout.splitlines()
