"""The Ascend compile gate as the doctor runs it: found, missing, failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_slots.cli import main
from fused_slots.inspect import ascend_gate
from fused_slots.inspect.ascend_gate import run_ascend_gate


def test_the_gate_is_where_it_is_looked_for() -> None:
    assert ascend_gate.GATE.exists()


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_gate, "COMPILER", "no_such_package")
    gate = run_ascend_gate()
    assert not gate.passed
    assert "make test-ascend" in gate.report


def test_without_the_source_tree_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_gate, "GATE", Path("nowhere"))
    assert "source tree" in run_ascend_gate().report


@pytest.mark.parametrize(("body", "passed"), [("pass", True), ("assert 'budget' == 0", False)])
def test_it_tells_what_the_gate_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, passed: bool
) -> None:
    gate = tmp_path / "test_gate.py"
    gate.write_text(f"def test_gate():\n    {body}\n")
    monkeypatch.setattr(ascend_gate, "GATE", gate)
    monkeypatch.setattr(ascend_gate, "COMPILER", "pytest")
    found = run_ascend_gate()
    assert found.passed is passed
    assert ("1 passed" in found.report) is passed
    assert ("budget" in found.report) is not passed


def test_the_doctor_reports_the_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ascend_gate, "GATE", Path("nowhere"))
    assert main(["doctor", "--ascend"]) == 1
    out = capsys.readouterr().out
    assert "Ascend compile gate: not run" in out
