"""The engine of the tutorial works, and what the page says of it when it is broken is true."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from fused_slots import IntegrityError
from fused_slots.cli import main
from fused_slots.recording.as_scheduled import as_scheduled
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import load_schedule

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "tutorial.md").read_text()


def run(folder: Path) -> None:
    try:
        runpy.run_path(str(folder / "engine.py"), run_name="__main__")
    finally:
        for name in ("toy", "blocks"):
            sys.modules.pop(name, None)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, to be edited."""
    for path in (DOCS / "examples").glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def edit(folder: Path, old: str, new: str) -> None:
    texts = {path: path.read_text() for path in folder.glob("*.py")}
    (path,) = [path for path, text in texts.items() if old in text]
    assert texts[path].count(old) == 1
    path.write_text(texts[path].replace(old, new))


def test_it_says_what_the_page_shows(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(engine)
    assert f"```text\n{capsys.readouterr().out}```" in PAGE


def test_a_block_that_is_freed_too_early_is_found_as_the_page_shows(engine: Path) -> None:
    edit(engine, "request.computed - (WINDOW - 1)", "request.computed - 1")
    with pytest.raises(AssertionError) as first:
        run(engine)
    edit(engine, "        check(", "        self.tables.check_integrity(); (")
    with pytest.raises(IntegrityError) as later:
        run(engine)
    assert f"```text\nAssertionError: {first.value}\n```" in PAGE
    assert f"```text\n{later.value}\n```" in PAGE
    edit(engine, "self.tables.check_integrity(); ", "")
    with pytest.raises(AssertionError, match="not what the model says"):
        run(engine)


@pytest.fixture
def recorded(engine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine that checks nothing and is recorded as the page says."""
    monkeypatch.chdir(engine)
    edit(engine, "        check(", "        (")
    made, asked = "engine = Engine(device)\n", "    for prompt, request in"
    start, save = re.findall(r"^engine\.tables\..*$", PAGE, re.MULTILINE)
    edit(engine, made, f"{made}    {start}\n")
    edit(engine, asked, f"    {save}\n{asked}")
    return engine


def test_the_recording_of_the_broken_engine_shows_what_the_page_says(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(recorded, "request.computed - (WINDOW - 1)", "request.computed - 1")
    with pytest.raises(AssertionError, match="not what the model says"):
        run(recorded)
    assert main(["check", "broken.npz.xz"]) == 1
    assert f"$ fused-slots check broken.npz.xz\n{capsys.readouterr().out}```" in PAGE
    assert main(["report", "broken.npz.xz", "-o", "page.html"]) == 1


def test_a_wrong_block_id_is_found_in_the_recording(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (wrong,) = re.findall(r"`(\[\[block .*?)` in the place of `\[\*new, \[\]\]`", PAGE)
    edit(recorded, "[*new, []]", wrong)
    with pytest.raises(AssertionError, match="not what the model says"):
        run(recorded)
    assert main(["check", "broken.npz.xz"]) == 1
    first = capsys.readouterr().out.splitlines()[4]
    assert f"```text\n{first}\n```" in PAGE


def test_the_recording_of_the_engine_as_it_is_has_no_finding(recorded: Path) -> None:
    run(recorded)
    assert main(["check", "broken.npz.xz"]) == 0
    drawn = ScheduleCheck(as_scheduled(load_schedule("broken.npz.xz")))
    assert not [text for text in drawn if "shares none" in text], "as the page draws it"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max(len(hits) * BLOCK - WINDOW, 0)", "len(hits) * BLOCK"),
        ("if not self.users[block]:", "if True:"),
        ("self.cached = {text: other", "_ = {text: other"),
    ],
    ids=["hits not replayed", "shared blocks freed", "stale hits"],
)
def test_other_bugs_give_wrong_answers(engine: Path, old: str, new: str) -> None:
    edit(engine, old, new)
    with pytest.raises(AssertionError, match="not what the model says"):
        run(engine)


def test_every_part_that_the_page_embeds_exists() -> None:
    for name, body in re.findall(r"```{literalinclude} (\S+)\n(.*?)```", PAGE, re.DOTALL):
        text = (DOCS / name).read_text()
        for mark in re.findall(r":(?:start|end)-[a-z]+: \"?(.*?)\"?\n", body):
            assert mark in text, mark
