"""Every release that has a contract: its signatures, and of some the tables in lockstep.

Each is run in a process of its own, with the packages of one environment; its folder comes first
on the path. `make test-releases` fetches them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_slots.vllm.releases import find_contract
from tests.releases.releases import LOCKSTEP, VERSIONS, folder_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_signatures_are_those_of_the_contract(version: str) -> None:
    contract = find_contract({"vllm": version})
    for owner in (*contract.tables, *contract.runners):
        path = folder_of("vllm", version) / (owner.module.replace(".", "/") + ".py")
        (found,) = (
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == owner.name
        )
        methods = {
            node.name: tuple(a.arg for a in node.args.args[1:] + node.args.kwonlyargs)
            for node in found.body
            if isinstance(node, ast.FunctionDef)
        }
        assert {name: methods.get(name) for name in owner.methods} == owner.methods


@pytest.mark.parametrize("version", LOCKSTEP)
def test_inside(version: str) -> None:
    path = os.pathsep.join([str(folder_of("vllm", version)), str(ROOT)])
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rP",
            str(HERE / "inside"),
            "-p",
            "no:cacheprovider",
        ],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0
    assert " skipped" not in result.stdout.splitlines()[-1]
