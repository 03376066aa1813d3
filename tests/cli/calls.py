"""Calls of the command line, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fused_slots.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, Any]]:
    status = main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line on standard error, progress apart, of a call that is wrong use."""
    assert main([*map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("fused-slots")]
    assert len(lines) == 1, captured.err
    return lines[0]
