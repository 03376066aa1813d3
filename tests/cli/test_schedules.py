"""Commands on recordings: demo, replay, check, record."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fused_slots import env
from fused_slots.cli import main
from fused_slots.inspect.pictures import Film
from fused_slots.recording.schedule import load_recording, load_schedule
from tests.cli.calls import error_line, run_json
from tests.recording.small_schedules import schedule


def test_demo_judges_a_recording_and_names_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--recording", "preemption", "--output", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    picture = tmp_path / "block_tables_preemption.png"
    assert str(picture) in captured.out
    assert picture.stat().st_size > 10_000
    assert "41 preempted, 41 resumed" in captured.out
    assert "preemption: step 400 of 400" in captured.err


def test_demo_all_replays_every_recording(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.cli.schedules.load_schedule", lambda *_: schedule())
    status, document = run_json(capsys, "demo", "--recording", "all", "--no-picture")
    assert status == 0
    assert document["good"] is True
    assert len(document["replays"]) >= 7


def test_demo_with_a_mismatch_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bad_file: Path
) -> None:
    monkeypatch.setattr(
        "fused_slots.cli.schedules.load_schedule", lambda *_: load_schedule(bad_file)
    )
    status, document = run_json(capsys, "demo", "--no-picture")
    assert (status, document["good"]) == (1, False)
    assert "slot = 8: a slot of a paged block" in document["replays"][0]["mismatches"][2]


def test_replay_of_a_file_and_of_a_recording_give_one_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_recording("preemption").save(tmp_path / "copy.npz.xz")
    digests = []
    for source in ("preemption", tmp_path / "copy.npz.xz"):
        status, document = run_json(capsys, "replay", source)
        assert (status, document["num_mismatches"]) == (0, 0)
        digests.append(document["digest"])
    assert digests[0] == digests[1]


def test_replay_draws_where_it_is_told(
    good_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = run_json(capsys, "replay", good_file, "--picture", tmp_path / "p.png")
    assert status == 0
    assert Path(document["picture"]).exists()


def test_replay_of_a_spoiled_file_is_a_finding(
    bad_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(bad_file)]) == 1
    assert "the KV manager says 160" in capsys.readouterr().out


def test_replay_takes_the_rules_of_the_command_line(
    good_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, document = run_json(capsys, "replay", good_file, "--replay-window", "1")
    assert document["slots_padded"]["replayed token of a shared block"] == 2
    _, document = run_json(capsys, "replay", good_file, "--pad-requests-to", "4")
    assert document["slots_padded"]["dummy request (graph padding)"] == 3 * 8


def test_backend_option_sets_the_variable(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.BACKEND.name, "")
    status, _ = run_json(capsys, "replay", good_file, "--backend", "cpu")
    assert status == 0
    assert env.BACKEND.read() == "cpu"


def test_picture_without_matplotlib_is_one_line(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.inspect.pictures.find_spec", lambda name: None)
    monkeypatch.setattr("fused_slots.cli.schedules.Replay", None)  # found before any replay
    line = error_line(capsys, "replay", good_file, "--picture", "p.png")
    assert "expected the package matplotlib" in line


def test_check_of_a_good_file(good_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good_file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{good_file}: 3 steps, no finding\n"
    assert captured.err == "check: step 1 of 3\ncheck: step 2 of 3\ncheck: step 3 of 3\n"


def test_check_lists_findings(bad_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, "check", bad_file)
    assert (status, document["good"], document["steps"]) == (1, False, 3)
    assert document["findings"][0] == (
        "step 0: row 2 of group 0 (full), column 0 is block 1, the KV manager says 20"
    )


def test_check_of_a_damaged_file_is_a_finding(
    good_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good_file.write_bytes(good_file.read_bytes()[:-40])
    assert main(["check", str(good_file)]) == 1
    assert "expected a complete fused_slots schedule file" in capsys.readouterr().out


def test_one_finding_is_one_finding(bad_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(bad_file)]) == 1
    assert f"{bad_file}: 1 finding\n" in capsys.readouterr().out


def test_check_takes_what_replay_takes(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, "check", "preemption")
    assert (status, document["steps"], document["findings"]) == (0, 400, [])


def test_demo_takes_a_file(
    good_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = run_json(capsys, "demo", "--recording", good_file, "--output", tmp_path)
    assert status == 0
    assert document["replays"][0]["picture"] == str(tmp_path / "block_tables_good.png")


def test_demo_without_matplotlib_goes_on_without_a_picture(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.inspect.pictures.find_spec", lambda name: None)
    assert main(["demo", "--recording", str(good_file), "--output", str(good_file.parent)]) == 0
    captured = capsys.readouterr()
    assert "Every gathered table and every slot equals" in captured.out
    assert "  picture" not in captured.out
    assert "goes on without a picture. picture: expected the package matplotlib" in captured.err
    assert "pip install matplotlib" in captured.err


def test_a_picture_that_fails_to_be_written_does_not_cost_the_report(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Film, path: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Film, "draw", full)
    picture = good_file.parent / "x.png"
    assert main(["replay", str(good_file), "--picture", str(picture)]) == 2
    captured = capsys.readouterr()
    assert "Every gathered table and every slot equals" in captured.out
    assert captured.err.endswith(f"fused-slots replay: {picture}: No space left on device\n")


def test_check_cuts_long_lists(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [f"finding {n}" for n in range(23)]
    monkeypatch.setattr("fused_slots.cli.schedules.ScheduleCheck", lambda *_: findings)
    assert main(["check", str(good_file)]) == 1
    out = capsys.readouterr().out
    assert "finding 19\n... and 3 more" in out
    assert "finding 20" not in out


def test_record_says_which_package_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", no_package)
    line = error_line(capsys, "record", "preemption", tmp_path / "new.npz.xz")
    assert "vllm: expected version 0.33.0 installed; got no vllm" in line


def test_record_hands_over_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def record(scenario: str, path: Path, watch: Callable) -> object:
        asked.append((scenario, path, list(watch([1, 2, 3], 3))))
        return schedule()

    monkeypatch.setattr("bench.recording.recorder.record", record)
    path = tmp_path / "new.npz.xz"
    assert main(["record", "preemption", str(path)]) == 0
    assert asked == [("preemption", path, [1, 2, 3])]
    captured = capsys.readouterr()
    assert captured.out == f"{path}: 3 steps of preemption\n"
    assert captured.err.splitlines()[-1] == "preemption: step 3 of 3"
