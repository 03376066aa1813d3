"""The command line as a whole: help, exit status, and one-line errors without tracebacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fused_slots
from fused_slots.cli import main
from fused_slots.cli.result import check_writable
from tests.cli.calls import error_line
from tests.recording.small_schedules import schedule

COMMANDS = (
    *("demo", "explain", "check", "merge", "record", "replay", "report", "plan", "bench"),
    *("doctor", "warmup"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "Exit status: 0 good, 1 a finding, 2 wrong use." in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["check"],
        ["explain", "5"],
        ["explain", "5", "--block-size", "16", "--blocks", "1,x"],
        ["explain", "5", "--block-size", "16", "--blocks", "3,,7"],
        ["explain", "5", "--block-size", "16", "--blocks", ""],
        ["replay", "preemption", "--picture", "x.jpg"],
        ["replay", "preemption", "--picture", "png"],
        ["record", "none such", "file"],
    ],
)
def test_wrong_use_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay", "{good}", "--device", "toaster"], "device: expected"),
        (
            ["replay", "{good}", "--cp-size", "2", "--cp-interleave", "3"],
            "context_parallel.interleave of group 0 (full): expected a divisor",
        ),
        (["replay", "{good}", "--cp-rank", "3"], "context_parallel.rank: expected"),
        (["replay", "{good}", "--pad-requests-to", "-4"], "pad_requests_to: expected"),
        (["replay", "{tmp}/absent"], "{tmp}/absent: No such file or directory"),
        (["replay", "{tmp}"], "{tmp}: Is a directory"),
        (["replay", "{text}"], "expected a complete fused_slots schedule file"),
        (["check", "{tmp}/absent"], "{tmp}/absent: No such file or directory"),
        (["check", "absent"], "recording: expected a file, or one of async_scheduling, "),
        (["demo", "--recording", "none such"], "got 'none such'"),
        (["check", "preemption", "--max-mib", "0"], "raise max_bytes (--max-mib on"),
        (["replay", "{good}", "--picture", "{tmp}/new/x.png"], "{tmp}/new: No such folder"),
        (["demo", "--output", "{tmp}/new"], "{tmp}/new: No such folder"),
        (["demo", "--output", "{text}"], "{text}: No such folder"),
        (["record", "preemption", "{tmp}/new/x"], "{tmp}/new: No such folder"),
        (["record", "preemption", "{tmp}"], "{tmp}: Is a directory"),
        (["bench", "--save", "{tmp}/new/x.json"], "{tmp}/new: No such folder"),
        (["replay", "{good}", "--picture", "{text}/x.png"], "{text}"),
        (["explain", "5", "--block-size", "0"], "block_size: expected"),
        (["explain", "5", "--block-size", "8", "--blocks", "-1"], "expected a block id"),
        (["warmup", "--max-num-reqs", "0"], "max_num_reqs: expected"),
    ],
)
def test_wrong_input_is_one_line(
    argv: list[str],
    message: str,
    good_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    text.write_text("not a schedule")
    places = {"good": good_file, "tmp": tmp_path, "text": text}
    line = error_line(capsys, *(word.format(**places) for word in argv))
    assert line.startswith(f"fused-slots {argv[0]}: ")
    assert message.format(**places) in line


def test_nothing_is_begun_whose_result_cannot_be_written(
    good_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr("fused_slots.cli.schedules.Replay", lambda *_, **__: begun.append(1))
    for argv in (
        ["replay", str(good_file), "--picture", str(tmp_path / "new" / "x.png")],
        ["demo", "--output", str(tmp_path / "new")],
    ):
        assert main(argv) == 2
    assert begun == []
    assert not (tmp_path / "new").exists()


def test_a_file_that_may_not_be_written_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    existing = tmp_path / "old.png"
    existing.touch()
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    for path, decides in ((existing, existing), (tmp_path / "new.png", tmp_path)):
        with pytest.raises(PermissionError, match="Permission denied"):
            check_writable(path)
        assert asked.pop() == decides


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fused-slots {fused_slots.__version__}\n"


def test_what_would_steer_the_terminal_is_printed_as_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b[2J\u202egood\r"
    plain = schedule()
    groups = (replace(plain.groups[0], name=hostile), *plain.groups[1:])
    replace(plain, name=hostile, groups=groups).save(tmp_path / "hostile.npz.xz")
    assert main(["replay", str(tmp_path / "hostile.npz.xz")]) == 0
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert r"\x1b[2J\u202egood\r" in text
        assert not set(hostile) & set(text) - set("[2Jgood")


@pytest.mark.parametrize(
    ("argv", "sign"),
    [
        (["demo", "--no-picture"], "step 40 of 400"),
        (["report", "preemption", "-o", "{tmp}/page.html"], "step 40 of 400"),
        (["bench", "--select", "append"], "bench: "),
    ],
    ids=["demo", "report", "bench"],
)
def test_an_interrupt_ends_quietly(argv: list[str], sign: str, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "fused_slots", *(word.format(tmp=tmp_path) for word in argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores the signal for what it starts in the background; children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stderr is not None
    assert any(sign in line for line in run.stderr)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert out == ""
    assert all(": step " in line or "bench: " in line for line in err.splitlines()), err
    assert not list(tmp_path.iterdir())


def test_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "fused_slots", "explain", "--block-size", "16"]
    positions = list(map(str, range(4000)))
    run = subprocess.Popen(
        [*command, *positions, "--blocks", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == b""
    assert run.wait() == 0
