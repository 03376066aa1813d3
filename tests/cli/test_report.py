"""The report command: what it writes, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import load_schedule
from tests.cli.calls import error_line, run_json


def test_command_writes_where_it_is_told(
    good_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = run_json(capsys, "report", good_file, "-o", tmp_path / "page.html")
    assert (status, document["good"], document["steps_shown"]) == (0, True, [0, 2])
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!DOCTYPE html>")


def test_command_finds_what_check_finds(
    bad_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = run_json(capsys, "report", bad_file, "-o", tmp_path / "page.html")
    assert (status, document["good"]) == (1, False)
    assert document["num_findings"] == len(list(ScheduleCheck(load_schedule(bad_file))))


def test_command_makes_no_folder(
    good_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(capsys, "report", good_file, "-o", tmp_path / "new" / "page.html")
    assert "No such folder" in line
    assert not (tmp_path / "new").exists()
