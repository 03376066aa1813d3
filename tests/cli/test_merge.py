"""The merge command: what it refuses, what it writes, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_slots.cli import main
from tests.cli.calls import error_line, run_json
from tests.recording.rank_files import record_rank


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ranks")
    return [record_rank(folder, rank, 2, turns=30 + rank, num_calls=9) for rank in range(2)]


def test_one_file_is_checked_as_it_is_written(
    ranks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = tmp_path / "all.npz.xz"
    status, document = run_json(capsys, "merge", *ranks, "-o", merged)
    assert (status, document["good"], document["ranks"]) == (0, True, 2)
    assert document["file"] == str(merged)
    assert [note[:26] for note in document["notes"]] == [
        f"rank {n}: calls 19 to 30 of " for n in (0, 1)
    ]
    again = run_json(capsys, "check", merged)
    assert again == (status, document)
    given = run_json(capsys, "check", *ranks)[1]
    assert given == {**document, "file": " ".join(ranks)}
    assert [path.name for path in tmp_path.iterdir()] == ["all.npz.xz"]


def test_replay_goes_through_all_ranks(
    ranks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = run_json(capsys, "replay", *ranks)
    assert (status, document["good"]) == (0, True)
    assert [replay["recording"] for replay in document["replays"]] == [
        "recorded, rank 0",
        "recorded, rank 1",
    ]
    first, second = document["replays"]
    assert first["slots_mapped"] != second["slots_mapped"]
    assert first["steps"] == second["steps"] == document["replays"][0]["steps"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{0}"], "ranks: expected a file of each of 2 ranks; got none of rank 1"),
        (["{0}", "{0}"], "expected each rank once; got rank 0 again"),
        (["{0}", "{1}", "{good}"], "{good}: expected calls of a manager; got a scheduler's steps"),
        (["{0}", "{tmp}/absent.npz.xz"], "{tmp}/absent.npz.xz: No such file or directory"),
        (["{all}"], "{all}: expected a recording of one rank; got of 2 ranks"),
        (["{all}", "{0}"], "{all}: expected a recording of one rank; got of 2 ranks"),
        (["{0}", "{empty}"], "{empty}: expected a complete fused_slots schedule file"),
        (["{0}", "{text}"], "{text}: expected a complete fused_slots schedule file"),
        (["preemption", "{0}"], "preemption: expected calls of a manager"),
        (["{0}", "{1}", "--max-mib", "0"], "raise max_bytes (--max-mib on"),
    ],
)
def test_what_cannot_be_merged_is_one_line_and_no_file(
    argv: list[str],
    message: str,
    ranks: list[str],
    good_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no schedule")
    places = {"good": good_file, "tmp": tmp_path, "empty": tmp_path / "empty"}
    places |= {"text": tmp_path / "text", "all": tmp_path / "all.npz.xz"}
    assert main(["merge", *ranks, "-o", str(places["all"])]) == 0
    capsys.readouterr()
    words = [word.format(*ranks, **places) for word in argv]
    line = error_line(capsys, "merge", *words, "-o", tmp_path / "new.npz.xz")
    assert message.format(*ranks, **places) in line
    assert not (tmp_path / "new.npz.xz").exists()


def test_what_is_read_is_not_written_over(
    ranks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(ranks[1]).read_bytes()
    for command in ("merge", "report"):
        line = error_line(capsys, command, *ranks, "-o", ranks[1])
        assert "--output: expected another file than those that are read" in line
    assert Path(ranks[1]).read_bytes() == before


def test_wrong_use_and_folders(
    ranks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["merge", *ranks])
    assert "the following arguments are required: -o/--output" in capsys.readouterr().err
    assert "No such folder" in error_line(capsys, "merge", *ranks, "-o", tmp_path / "n" / "x")
    assert not (tmp_path / "n").exists()


def test_other_commands_say_what_is_not_one_job(
    ranks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", ranks[0], ranks[0]]) == 1
    assert "expected each rank once" in capsys.readouterr().out
    assert "expected each rank once" in error_line(capsys, "replay", ranks[1], ranks[1])
