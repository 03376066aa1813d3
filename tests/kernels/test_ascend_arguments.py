"""Ascend's kernels declare their arguments once, keep them few, and share sizes with the plans."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import fused_slots
from fused_slots.backends.ascend import plan
from fused_slots.kernels.ascend import layout, slots, step

FOLDER = Path(fused_slots.__file__).parent / "kernels" / "ascend"
ENTRIES = [slots.slots_on_ascend, step.step_on_ascend]
MOST = 20


def test_only_kernel_entries_take_more_than_twenty_arguments() -> None:
    entries = {entry.fn.__name__ for entry in ENTRIES}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in entries:
                assert len(node.args.args) <= MOST, f"{path.name}: {node.name}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.fn.__name__)
def test_docstrings_say_what_each_argument_is_in_the_order_of_the_signature(entry: object) -> None:
    function = entry.fn  # type: ignore[attr-defined]
    documented = re.findall(r"^        (\w+): ", function.__doc__, re.MULTILINE)
    assert documented == list(function.__annotations__)


def test_plans_and_kernels_have_the_same_sizes() -> None:
    for name in ("TILE", "SPAN", "ENTRY_WEIGHT", "PAD_TILE", "ENTRIES"):
        assert getattr(plan, name) == getattr(layout, name).value, name
