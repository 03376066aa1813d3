"""Progress: lines where nobody watches, a bar on a terminal, nothing beside JSON."""

from __future__ import annotations

import io
from argparse import Namespace

import pytest

from fused_slots.cli import progress
from fused_slots.cli.progress import announce, with_progress

PEOPLE, MACHINE = Namespace(json=False), Namespace(json=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_progress(PEOPLE, "abc", 3, "small")) == ["a", "b", "c"]
    assert list(with_progress(PEOPLE, range(100), 100, "big")) == list(range(100))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [f"small: step {n} of 3" for n in (1, 2, 3)]
    assert lines[3:] == [f"big: step {n}0 of 100" for n in range(1, 11)]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    assert list(with_progress(PEOPLE, "abc", 3, "[red]small\r")) == ["a", "b", "c"]
    assert "100%" in progress.sys.stderr.getvalue()
    assert r"[red]small\r" in progress.sys.stderr.getvalue()


def test_lines_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert list(with_progress(PEOPLE, "abc", 3, "small")) == ["a", "b", "c"]
    assert progress.sys.stderr.getvalue().endswith("small: step 3 of 3\n")


def test_nothing_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    announce(MACHINE, "compiling")
    assert list(with_progress(MACHINE, "abc", 3, "small")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
