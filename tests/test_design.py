"""The walks of docs/design.md name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fused_slots

PACKAGE = Path(fused_slots.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"

HOPS = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_the_walks_are_found() -> None:
    devices = {file.rpartition("/")[0] for file, _ in HOPS}
    assert {"", "backends", "kernels/gpu", "kernels/ascend"} <= devices
    assert len(HOPS) >= 20


@pytest.mark.parametrize(("file", "function"), HOPS)
def test_a_hop_is_a_function_of_its_file(file: str, function: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in defined


def test_every_file_that_the_page_names_exists() -> None:
    root = PACKAGE.parent
    for name in set(re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|c))`", PAGE.read_text())):
        places = (PACKAGE / name, root / name, PACKAGE / "host" / name)
        assert any(place.exists() for place in places), name
