"""The report command: what it writes, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_slots.cli import main
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent"], "recording: expected a file, or one of async_scheduling, "),
        (["{tmp}/absent.npz.xz"], "{tmp}/absent.npz.xz: No such file or directory"),
        (["{tmp}"], "{tmp}: Is a directory"),
        (["{empty}"], "{empty}: expected a complete fused_slots schedule file"),
        (["{garbage}"], "{garbage}: expected a complete fused_slots schedule file"),
        (["{good}", "-o", "{tmp}"], "{tmp}: Is a directory"),
        (["{good}", "-o", "{empty}/x.html"], "{empty}: No such folder"),
        (["{good}", "-o", "-"], "--output: expected a file; got -"),
        (["{good}", "-o", "{good}"], "--output: expected another file than those that are read"),
        (["{good}", "-o", "/dev/full"], "/dev/full: No space left on device"),
        (["{good}", "--page-mib", "0"], "page: expected at most 0 bytes of rows and steps"),
        (["{good}", "--around", "3"], "--around: expected an int in [0, 2]; got 3"),
        (["{good}", "--cp-rank", "3"], "context_parallel.rank: expected"),
        (
            ["{good}", "--cp-size", "2", "--cp-interleave", "3"],
            "context_parallel.interleave of group 0 (full): expected a divisor",
        ),
    ],
)
def test_wrong_input_is_one_line_and_no_file(
    argv: list[str],
    message: str,
    good_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 20)
    places = {name: tmp_path / name for name in ("empty", "garbage")}
    places |= {"good": good_file, "tmp": tmp_path}
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    line = error_line(capsys, "report", *(word.format(**places) for word in argv))
    assert line.startswith("fused-slots report: ")
    assert message.format(**places) in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("argv", [["--page-mib", "-1"], ["--max-mib", "-1"], ["--around", "-1"]])
def test_negative_numbers_are_wrong_use(
    argv: list[str], good_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(good_file), *argv])
    assert stop.value.code == 2
    assert f"argument {argv[0]}: expected a number from 0 on; got '-1'" in capsys.readouterr().err


def test_progress_goes_to_standard_error(
    good_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(good_file), "-o", str(page)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{good_file}: 3 steps, no finding\n{page}: open it in a browser\n"
    assert captured.err.splitlines() == [
        *(f"report: step {step} of 3" for step in (1, 2, 3)),
        "report: writing the page",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_half_a_page_is_not_left(
    error: BaseException,
    good_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, page = Path.write_bytes, tmp_path / "page.html"

    def half(path: Path, content: bytes) -> None:
        whole(path, content[: len(content) // 2])
        raise error

    monkeypatch.setattr(Path, "write_bytes", half)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert main(["report", str(good_file), "-o", str(page)]) == (130 if interrupted else 2)
    assert not page.exists()
    if not interrupted:
        assert f"{page}: No space left on device" in capsys.readouterr().err
