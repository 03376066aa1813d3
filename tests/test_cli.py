"""The command line: what it prints, its exit status, and one-line errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_slots import env
from fused_slots.backends.cpu import CpuBackend
from fused_slots.cli import bench, main
from fused_slots.plan import WarmupReport
from fused_slots.recording.schedule import load_recording, load_schedule
from tests.recording.small_schedules import schedule, with_truth

COMMANDS = ("demo", "explain", "check", "record", "replay", "bench", "doctor", "warmup")


@pytest.fixture(name="good_file")
def _good_file(tmp_path: Path) -> Path:
    schedule().save(tmp_path / "good.npz.xz")
    return tmp_path / "good.npz.xz"


@pytest.fixture(name="bad_file")
def _bad_file(tmp_path: Path) -> Path:
    spoiled = schedule(lambda steps: [with_truth(steps[0], 0, 0, [20]), *steps[1:]])
    spoiled.save(tmp_path / "bad.npz.xz")
    return tmp_path / "bad.npz.xz"


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, Any]]:
    status = main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line on standard error of a call that is wrong use."""
    assert main([*map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if ": step " not in line]
    assert len(lines) == 1, captured.err
    return lines[0]


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
        ["demo", "--recording", "none such"],
        ["explain", "5", "--block-size", "16", "--blocks", "1,x"],
        ["record", "none such", "file"],
    ],
)
def test_wrong_use_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


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
    monkeypatch.setattr("fused_slots.cli.schedules.load_recording", lambda name: schedule())
    status, document = run_json(capsys, "demo", "--recording", "all", "--no-picture")
    assert status == 0
    assert document["good"] is True
    assert len(document["replays"]) >= 7


def test_demo_with_a_mismatch_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bad_file: Path
) -> None:
    monkeypatch.setattr(
        "fused_slots.cli.schedules.load_recording", lambda name: load_schedule(bad_file)
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay", "{good}", "--device", "toaster"], "device: expected"),
        (["replay", "{good}", "--cp-size", "2"], "context_parallel.size with circular"),
        (["replay", "{good}", "--cp-rank", "3"], "context_parallel.rank: expected"),
        (["replay", "{good}", "--pad-requests-to", "-4"], "pad_requests_to: expected"),
        (["replay", "{tmp}/absent"], "{tmp}/absent: No such file or directory"),
        (["replay", "{tmp}"], "{tmp}: Is a directory"),
        (["replay", "{text}"], "expected a complete fused_slots schedule file"),
        (["check", "{tmp}/absent"], "{tmp}/absent: No such file or directory"),
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


def test_picture_without_matplotlib_is_one_line(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.inspect.pictures.find_spec", lambda name: None)
    line = error_line(capsys, "replay", good_file, "--picture", "p.png")
    assert "expected the package matplotlib" in line


def test_check_of_a_good_file(good_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good_file)]) == 0
    assert capsys.readouterr().out == f"{good_file}: 3 steps, no finding\n"


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


def test_check_cuts_long_lists(
    good_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [f"finding {n}" for n in range(23)]
    monkeypatch.setattr("fused_slots.cli.schedules.ScheduleCheck", lambda _: findings)
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

    def record(scenario: str, path: Path) -> object:
        asked.append((scenario, path))
        return schedule()

    monkeypatch.setattr("fused_slots.cli.schedules.record", record)
    path = tmp_path / "new.npz.xz"
    assert main(["record", "preemption", str(path)]) == 0
    assert asked == [("preemption", path)]
    assert capsys.readouterr().out == f"{path}: 3 steps of preemption\n"


@pytest.mark.parametrize(
    ("options", "slot", "outcome", "status"),
    [
        ("20 --block-size 32 --kernel-block-size 16 --blocks 3", 116, "paged", 0),
        ("300 --block-size 640 --kernel-block-size 128 --blocks 3", 2220, "paged", 0),
        ("16 --block-size 16 --blocks 5", -1, "column_out_of_row", 1),
        ("8192 --block-size 4 --circular --blocks 7", 28, "ring", 0),
        ("0 --block-size 4 --circular", -1, "empty_ring", 1),
        ("5 --block-size 64 --mode none --blocks 9", -1, "state_group", 0),
        ("5 --block-size 16 --blocks 5 --dummy", -1, "dummy", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2 --replicated", 97, "paged", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2", -1, "other_rank", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2 --cp-rank 1", 72, "paged", 0),
        ("4 --block-size 4 --blocks 3,5 --replay-window 4 --replay-start 4", -1, "replayed", 0),
        (
            "4 --block-size 4 --blocks 0,6 --replay-window 4 --replay-start 4 "
            "--not-prefix-cacheable",
            24,
            "paged",
            0,
        ),
    ],
)
def test_explain_derives_the_slot(
    options: str, slot: int, outcome: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, document = run_json(capsys, "explain", *options.split())
    (token,) = document["tokens"]
    assert (found, token["slot"], token["outcome"]) == (status, slot, outcome)
    assert token["derivation"][-1].startswith(f"slot = {slot}")


def test_explain_prints_one_derivation_a_position(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "3", "20", "--block-size", "16", "--blocks", "5,9"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "slot = 5 * 16 + 3 = 83" in first
    assert "slot = 9 * 16 + 4 = 148" in second


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


@pytest.fixture
def not_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-benchmark measures nothing where it sees pytest-xdist's mark."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.usefixtures("not_in_a_worker")
def test_bench_runs_one_benchmark_and_keeps_the_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "all.json"
    status, document = run_json(capsys, "bench", "--select", "append and 8x4", "--save", save)
    assert status == 0, document
    assert document["medians_us"]
    assert all("append" in row["name"] for row in document["medians_us"])
    assert json.loads(save.read_text())["benchmarks"]


def test_bench_that_selects_nothing_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--select", "no_such_benchmark"]) == 1
    assert "deselected" in capsys.readouterr().out


@pytest.fixture(name="own_benchmarks")
def _own_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bench/ folder with one benchmark, which the test may write."""
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    (tmp_path / "bench").mkdir()
    return tmp_path / "bench" / "bench_own.py"


@pytest.mark.usefixtures("not_in_a_worker")
def test_bench_shows_a_peer_measured_in_turns(
    own_benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_benchmarks.write_text(
        "def bench_own(benchmark):\n"
        "    benchmark.extra_info.update(ours_us=6.0, peer_us=4.0, ours_over_peer=1.5)\n"
        "    benchmark(int)\n"
        "def bench_alone(benchmark):\n"
        "    benchmark(int)\n"
    )
    assert main(["bench"]) == 0
    alone, own = sorted(capsys.readouterr().out.splitlines())
    assert alone.startswith("alone ")
    assert own.endswith("in turns 6.0 and the peer's 4.0 us: 1.50")


def test_bench_with_a_wrong_result_is_a_finding(
    own_benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_benchmarks.write_text(
        "def bench_good(benchmark):\n    benchmark(int)\n"
        "def bench_wrong(benchmark):\n    raise AssertionError('slots differ')\n"
    )
    status, document = run_json(capsys, "bench")
    assert (status, document["good"]) == (1, False)
    assert "slots differ" in document["output"]


def test_bench_outside_a_checkout_tells_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    assert "make bench" in error_line(capsys, "bench")


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
