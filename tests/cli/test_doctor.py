"""The doctor and warmup commands."""

from __future__ import annotations

import pytest

from fused_slots.backends.cpu import CpuBackend
from fused_slots.cli import main
from fused_slots.plan import WarmupReport
from tests.cli.calls import run_json


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, "doctor")
    assert document["backends"]["cpu"] == "works"
    assert status == (1 if document["problems"] else 0)
    assert main(["doctor"]) == status
    assert "FUSED_SLOTS_BACKEND" in capsys.readouterr().out


def test_doctor_with_a_problem_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_WARMUP", "maybe")
    assert main(["doctor"]) == 1
    assert "FUSED_SLOTS_WARMUP: expected 1 or 0; got 'maybe'" in capsys.readouterr().out


def test_warmup_lists_variants(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, "warmup")
    assert (status, document["device"], document["variants"]) == (0, "cpu", [])
    assert main(["warmup"]) == 0
    assert capsys.readouterr().out.startswith("0 variants on cpu")


def test_warmup_lists_what_a_backend_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = WarmupReport(variants=["small", "large"], seconds=1.5)
    monkeypatch.setattr(CpuBackend, "warmup", lambda self: report)
    assert main(["warmup"]) == 0
    assert capsys.readouterr().out == "2 variants on cpu in 1.50 s\nsmall\nlarge\n"
