"""Counts that depend on no machine are those recorded; what moved is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import counts

RECORD: dict[str, Any] = json.loads(counts.RECORD.read_text())
MEANT = "make record-counts, if it is meant"


@pytest.mark.parametrize("name", counts.IMPORTS)
def test_an_import_loads_the_modules_recorded(name: str) -> None:
    found = counts.imported(counts.IMPORTS[name])
    assert "fused_slots.groups" in found
    assert counts.moved(RECORD["imports"][name], found) == [], MEANT


def test_each_call_launches_and_asks_of_torch_what_is_recorded() -> None:
    found = counts.per_call()
    assert counts.moved(RECORD["calls"], found) == [], MEANT
    assert found["gpu"]["step with three appends"]["launches"] == 1


def test_each_configuration_has_the_number_of_variants_recorded() -> None:
    assert counts.moved(RECORD["variants"], counts.variants()) == [], MEANT


def test_the_package_has_no_more_lines_than_recorded() -> None:
    assert counts.lines() <= RECORD["lines"], MEANT


def test_what_holds_code_is_counted_and_nothing_else() -> None:
    statements = ['"""Two', 'lines."""', "# why", 'x = """a', 'b"""', "", "def f():", '    "says"']
    source = "\n".join([*statements, "    return (", "        1)", ""])
    assert counts.code_lines(source) == {4, 5, 7, 9, 10}


def test_what_moved_is_named() -> None:
    record = {"calls": {"step": {"launches": 1}}, "imports": ["a", "b"]}
    found = {"calls": {"step": {"launches": 2}}, "imports": ["b", "c"]}
    assert counts.moved(record, record) == []
    assert counts.moved(record, found) == [
        "calls: step: launches: 1 -> 2",
        "imports: - a",
        "imports: + c",
    ]
    assert counts.moved({"a": 1}, {"b": 1}) == ["a: 1 -> None", "b: None -> 1"]
