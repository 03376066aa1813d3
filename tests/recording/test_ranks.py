"""Recordings of context parallel ranks: aligned whatever they hold, and their differences named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import BlockTableError
from fused_slots.cli import main
from fused_slots.recording.arrays import ScheduleError
from fused_slots.recording.check import Finding, FindingKind
from fused_slots.recording.kept import row_step
from fused_slots.recording.ranks import align
from fused_slots.recording.ranks_check import RanksCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import (
    MAX_RANKS,
    Schedule,
    load_ranks,
    load_schedule,
    pack_ranks,
)
from fused_slots.recording.steps import Append, ScheduleStep
from fused_slots.reference import Outcome
from tests.recording.rank_files import Rank, record_rank
from tests.recording.small_schedules import schedule
from tests.recording.test_untrusted import changed_header, header_of, plain, write

LENGTHS = ((20, 70), (27, 73), (33, 71), (25, 70))
"""Of each rank: calls that it keeps at least, and its last call. All of them hold 41 to 70."""


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ranks")
    return [
        record_rank(folder, rank, num_calls=calls, turns=turns)
        for rank, (calls, turns) in enumerate(LENGTHS)
    ]


def loaded(files: list[str]) -> list[tuple[str, Schedule]]:
    return [(file, load_schedule(file)) for file in files]


def found(files: list[str]) -> list[Finding]:
    return list(RanksCheck(align(loaded(files))))


def spoiled(tmp_path: Path, files: list[str], cls: type[Rank], rank: int = 2) -> list[str]:
    """`files` with that of one rank made by a manager that was called otherwise."""
    calls, turns = LENGTHS[rank]
    other = record_rank(tmp_path, rank, num_calls=calls, turns=turns, cls=cls)
    return [*files[:rank], other, *files[rank + 1 :]]


def at(turn: int, change: Callable[..., None]) -> type[Rank]:
    """A manager whose call to `step` of one turn is changed."""

    class Spoiled(Rank):
        def step(self, number: int, *batch: torch.Tensor) -> None:
            if number == turn:
                change(self, number, *batch)
            else:
                super().step(number, *batch)

    return Spoiled


def misses(rank: Rank, turn: int, *batch: torch.Tensor) -> None:
    pass


def repeats(rank: Rank, turn: int, *batch: torch.Tensor) -> None:
    rank.tables.apply_staged_writes()
    Rank.step(rank, turn, *batch)


def another_position(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    positions[3] += 1
    Rank.step(rank, turn, rows, starts, positions)


def another_row(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    rows[[0, 1]] = rows[[1, 0]]
    Rank.step(rank, turn, rows, starts, positions)


def another_type(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    Rank.step(rank, turn, rows.long(), starts, positions)


def shorter(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    Rank.step(rank, turn, rows[:-1], starts[:-1], positions[: starts[-2]])


def replaying(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    rank.tables.step(
        *(rows, starts, positions),
        num_reqs_padded=len(rows),
        replay_start=torch.zeros_like(rows),
        replay_len=torch.zeros_like(rows),
    )


def padded(
    rank: Rank, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
) -> None:
    rank.tables.step(
        *(rows, starts, positions),
        num_reqs_padded=len(rows),
        num_tokens_padded=len(positions) + 1,
    )


def test_ranks_that_begin_and_end_anywhere_have_a_stretch_in_common(files: list[str]) -> None:
    given = loaded(files)
    ranks = align([given[2], given[0], given[3], given[1]])
    assert [rank.settings["context_parallel"] for rank in ranks if rank.settings] == [
        [4, rank, 2] for rank in range(4)
    ]
    assert [rank.metadata["aligned"].partition(" in ")[0] for rank in ranks] == [
        "rank 0: calls 41 to 70 of 41 to 70",
        "rank 1: calls 41 to 70 of 28 to 73",
        "rank 2: calls 41 to 70 of 34 to 71",
        "rank 3: calls 41 to 70 of 26 to 70",
    ]
    assert ranks[1].metadata["aligned"].endswith("16 left out")
    for rank, (_, whole) in zip(ranks, given, strict=True):
        assert len(rank) == 1 + 30
        # A file that goes on behind the stretch says nothing of the rows at its end.
        ends = whole.metadata["calls_before"] + whole.metadata["calls"] == 70
        assert bool(rank.metadata["state"]) == ends
        replay = Replay(rank)
        assert not [mismatch for step in replay for mismatch in step.mismatches]
    assert not list(RanksCheck(ranks))


def test_every_token_has_one_owner(files: list[str]) -> None:
    ranks = align(loaded(files))
    check = RanksCheck(ranks)
    assert not list(check)
    tokens = sum(len(step.positions) for step in ranks[0])
    sharded, replicated = check.outcomes[::4], check.outcomes[1::4]
    assert sum(counts[Outcome.PAGED] for counts in sharded) == tokens
    assert sum(counts[Outcome.OTHER_RANK] for counts in sharded) == 3 * tokens
    assert sum(counts[Outcome.PAGED] for counts in replicated) == 4 * tokens


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (misses, "rank 2 missed it, and made the next one in its place"),
        (repeats, "rank 2 made one before it that ranks 0, 1, 3 did not make"),
        (another_position, r"positions\[3\] \(row \d\) is \d+ on rank 2 and \d+ on ranks 0, 1, 3"),
        (another_row, r"idx_mapping\[0\] \(row (\d)\) is \d on rank 2 and \1 on ranks 0, 1, 3"),
        (another_type, "idx_mapping is int64 on rank 2 and int32 on ranks 0, 1, 3"),
        (shorter, r"num_reqs_padded is \d on rank 2 and \d on ranks 0, 1, 3"),
        (padded, r"num_tokens_padded is \d+ on rank 2 and \d+ on ranks 0, 1, 3"),
        (replaying, "replay_start was given on rank 2 only"),
    ],
)
def test_the_first_call_in_which_a_rank_parts_is_named(
    change: Callable[..., None], text: str, files: list[str], tmp_path: Path
) -> None:
    finding, *_ = found(spoiled(tmp_path, files, at(55, change)))
    assert finding.kind is FindingKind.RANKS_PART
    # Step 0 is the rows as they stood before call 41; turn 0 made call 1.
    assert re.match(f"step 16: rank 2 and ranks 0, 1, 3 part in call 56: {text}", finding), finding


def test_equal_calls_in_a_row_are_not_taken_for_missed_ones(files: list[str]) -> None:
    """Two calls that only apply what is staged; one rank was given another block in the first."""
    ranks = []
    for number, rank in enumerate(align(loaded(files))):
        steps = list(rank)
        write = Append(2, ([5], [6 + (number == 1)], [7], [8]), True)
        steps += [row_step([write]), row_step([])]
        ranks.append(rank.with_steps(steps, settings=rank.settings))
    text = next(iter(RanksCheck(ranks))).partition("part in ")[2]
    assert text == (
        "call 71: row 2 of group 1 (replicated) holds 1 block on rank 1 and 1 on ranks 0, 2, 3; "
        "block 0 is 7 and 6"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_who_parts_is_who_stands_alone(rank: int, files: list[str], tmp_path: Path) -> None:
    first, *_ = found(spoiled(tmp_path, files, at(55, another_position), rank))
    others = ", ".join(str(other) for other in range(4) if other != rank)
    assert f"rank {rank} and ranks {others} part in call 56: positions[3]" in first


class Forgets(Rank):
    """Skips the first append of blocks of the sharded group from turn 50 on."""

    done = False

    def append(self, turn: int, row: int, ids: list[list[int]], overwrite: bool) -> None:
        if turn >= 50 and ids[0] and not overwrite and not self.done:
            self.done = True
            self.skipped = turn, row
        else:
            super().append(turn, row, ids, overwrite)


class Mistakes(Rank):
    """Gets another block in the replicated group, in one append before the stretch."""

    done = False

    def append(self, turn: int, row: int, ids: list[list[int]], overwrite: bool) -> None:
        if turn >= 37 and overwrite and not self.done:
            self.done = True
            ids[1][0] += 1000
        super().append(turn, row, ids, overwrite)


def test_a_skipped_append_is_named_with_its_tokens_that_no_rank_has(
    files: list[str], tmp_path: Path
) -> None:
    first, *others = found(spoiled(tmp_path, files, Forgets))
    where = re.search(
        r"part in call (\d+): row (\d) of group 0 \(full\) holds (\d+) blocks? on rank 2 and (\d+) "
        r"on ranks 0, 1, 3; block (\d+) is none and \d+$",
        first,
    )
    assert where, first
    call, row, ours, theirs, column = map(int, where.groups())
    assert call > 50
    assert theirs == ours + 1
    assert column == ours
    assert (first.row, first.group, first.column) == (row, 0, column)
    none = [finding for finding in others if finding.kind is FindingKind.NOT_ONE_OWNER]
    sharded = [finding for finding in none if finding.group == 0]
    assert sharded
    assert all(f"of row {row} in group 0 (full) ha" in finding for finding in sharded)
    assert all("a slot on no rank, the first at" in finding for finding in sharded)
    of_rank = [finding for finding in others if finding.kind is FindingKind.FAULT]
    assert {finding.partition(": ")[2][:26] for finding in of_rank} == {
        "rank 2: column out of row "
    }


def test_rows_that_differ_before_the_stretch_are_named(files: list[str], tmp_path: Path) -> None:
    first, *others = found(spoiled(tmp_path, files, Mistakes))
    assert re.search(
        r"^step 0: rank 2 and ranks 0, 1, 3 part in the rows before the first call: row \d of "
        r"group 1 \(replicated\) holds (\d+) blocks? on rank 2 and \1 on ranks 0, 1, 3; block 0 is "
        r"1\d+ and \d+$",
        first,
    ), first
    assert not others or {finding.group for finding in others} == {1}


def test_a_replicated_token_with_another_slot_on_one_rank(files: list[str]) -> None:
    ranks = align(loaded(files))

    def changed(step: ScheduleStep) -> ScheduleStep:
        return replace(
            step,
            appends=tuple(
                replace(append, block_ids=(append.block_ids[0], [i + 7 for i in ids], *rest))
                for append in step.appends
                for _, ids, *rest in [append.block_ids]
            ),
        )

    other = ranks[1].with_steps(
        map(changed, ranks[1]), num_blocks=ranks[1].num_blocks + 7, settings=ranks[1].settings
    )
    texts = [f for f in RanksCheck([ranks[0], other]) if f.kind is FindingKind.NOT_ONE_OWNER]
    assert any("in group 1 (replicated) have another slot on one rank than" in f for f in texts)


def test_two_managers_of_one_rank_have_tokens_twice_and_not_at_all(files: list[str]) -> None:
    ranks = align(loaded(files))
    texts = list(RanksCheck([ranks[0], ranks[1], ranks[2], ranks[0]]))
    assert {text.kind for text in texts} == {FindingKind.NOT_ONE_OWNER}
    assert any("a slot on ranks 0, 3, the first at position" in text for text in texts)
    assert any("a slot on no rank, the first at position" in text for text in texts)


def test_a_call_missed_before_the_recordings_shifts_the_numbers(
    files: list[str], tmp_path: Path
) -> None:
    ranks = align(loaded(spoiled(tmp_path, files, at(10, misses))))
    assert not list(RanksCheck(ranks))
    assert "its call n is rank 0's call n+1: it made so many fewer" in ranks[2].metadata["aligned"]
    assert "rank 2: calls 41 to 70 of 35 to 71 in" in ranks[2].metadata["aligned"]
    assert "call n is" not in ranks[1].metadata["aligned"]


def with_graphs(whole: Schedule, forgotten: int) -> Schedule:
    """Calls without writes are replays of a graph, of which the ring has forgotten some."""
    steps, replays, hosts = [], 0, 0
    for number, step in enumerate(whole):
        assert step.call is not None
        if not step.appends:
            replays += 1
            if replays > forgotten:
                steps.append(replace(step, call=replace(step.call, graph=True)))
        else:
            hosts += number > 0
            steps.append(step)
    metadata = {
        **whole.metadata,
        "calls": len(steps) - 1,
        "calls_before": 40,
        "calls_of_graphs_before": 9 + forgotten,
    }
    return whole.with_steps(steps, metadata=metadata, settings=whole.settings)


def test_replays_of_graphs_are_aligned_by_their_own_numbers(files: list[str]) -> None:
    ranks = align(loaded(files))
    forgotten = (0, 3, 1, 2)
    given = [
        (f"rank {number}", with_graphs(rank, n))
        for number, (rank, n) in enumerate(zip(ranks, forgotten, strict=True))
    ]
    aligned = align(given)
    assert len({len(rank) for rank in aligned}) == 1
    graphs = [[step.call.graph for step in rank if step.call] for rank in aligned]
    assert sum(graphs[0]) > 1
    assert graphs[0] == graphs[1] == graphs[2] == graphs[3]
    assert not list(RanksCheck(aligned))
    left_out = [rank.metadata["aligned"].rpartition(", ")[2] for rank in aligned]
    assert left_out == ["3 left out", "0 left out", "2 left out", "1 left out"]


def refused(given: list[tuple[str, Schedule]]) -> str:
    with pytest.raises(ScheduleError) as error:
        align(given)
    return str(error.value)


def test_what_is_not_one_job_is_refused_by_name(files: list[str], tmp_path: Path) -> None:
    given = loaded(files)
    assert "a file of each of 4 ranks; got none of ranks 1, 3" in refused([given[0], given[2]])
    wrong = record_rank(tmp_path, 3, built_as=1)
    text = refused([*given[:3], (wrong, load_schedule(wrong))])
    assert f"{wrong}: expected each rank once; got rank 1 again, after {files[1]}" in text
    assert "both were built with the same context_parallel.rank" in text
    name, last = given[3]
    groups = (replace(last.groups[0], name="other"), *last.groups[1:])
    text = refused([*given[:3], (name, replace(last, groups=groups))])
    assert f"groups[0].name of {name}: expected full, as in {files[0]}" in text
    for settings, part in (
        ({"context_parallel": [4, 3, 4]}, "context_parallel.interleave of "),
        ({"context_parallel": [8, 3, 2]}, "context_parallel.size of "),
        ({"replay_window": 3}, "replay_window of "),
        ({"slot_dtype": "int32"}, "slot_dtype of "),
    ):
        other = replace(last, settings={**last.settings, **settings})
        assert part + name in refused([*given[:3], (name, other)])
    assert "groups of" in refused([*given[:3], (name, replace(last, groups=last.groups[:2]))])
    one = replace(last, settings={**last.settings, "context_parallel": [1, 0, 1]})
    assert "2 to 1024 ranks that share their groups; got 1" in refused([("x", one)])
    assert "calls of a manager; got a scheduler's steps" in refused([("x", schedule())])


def test_recordings_without_a_call_in_common_are_refused(files: list[str], tmp_path: Path) -> None:
    early = record_rank(tmp_path, 0, turns=30)
    text = refused([(early, load_schedule(early)), *loaded(files)[1:]])
    assert f"calls 1 to 30 in {early}, 28 to 73 in {files[1]}, 34 to 71 in" in text
    assert "Write all files at one time" in text


@pytest.mark.parametrize("value", [None, -1, "7", 1.5, True, [], 10**30])
@pytest.mark.parametrize("key", ["calls", "calls_before", "calls_of_graphs_before"])
def test_numbers_that_a_file_claims_are_not_believed(
    key: str, value: object, files: list[str]
) -> None:
    (name, first), *others = loaded(files)
    odd = replace(first, metadata={**first.metadata, key: value})
    assert f"metadata['{key}'] of {name}: expected" in refused([(name, odd), *others])


@pytest.mark.parametrize("off", [-2, 1])
def test_a_number_of_calls_that_is_not_that_of_the_file_is_refused(
    off: int, files: list[str]
) -> None:
    (name, first), *others = loaded(files)
    odd = replace(first, metadata={**first.metadata, "calls": len(first) + off})
    text = refused([(name, odd), *others])
    assert f"metadata['calls'] of {name}: expected {len(first)}; got {len(first) + off}" in text


@pytest.fixture(name="merged")
def _merged(files: list[str], tmp_path: Path) -> Path:
    (tmp_path / "all.npz.xz").write_bytes(pack_ranks(align(loaded(files))))
    return tmp_path / "all.npz.xz"


def test_one_file_holds_what_the_files_of_all_ranks_held(merged: Path, files: list[str]) -> None:
    read = load_ranks(merged)
    for of_file, rank in zip(read, align(loaded(files)), strict=True):
        assert (of_file.metadata, of_file.settings) == (rank.metadata, rank.settings)
        assert all(np.array_equal(of_file.arrays[n], rank.arrays[n]) for n in rank.arrays)
    content = merged.read_bytes()
    assert pack_ranks(read) == content
    assert len(content) < 2 * Path(files[0]).stat().st_size, "equal calls are kept once, as it were"
    with pytest.raises(ScheduleError, match="expected a recording of one rank; got of 4 ranks"):
        load_schedule(merged)


def claims(merged: Path, change: Callable[[dict[str, Any]], object]) -> str:
    header, arrays = header_of(plain(merged))
    change(header)
    write(merged, header, arrays)
    with pytest.raises(BlockTableError) as error:
        load_ranks(merged)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda h: h.pop("ranks"), "KeyError"),
        (lambda h: h.update(ranks=[[1, {}]] * 200_000), "200000 recordings of 4 ranks (at most"),
        (lambda h: h["settings"].update(context_parallel=[10**6, 0, 2]), f"(at most {MAX_RANKS})"),
        (
            lambda h: h["settings"].update(context_parallel=[1, 0, 2], ranks=h["ranks"][:1]),
            "of 1 r",
        ),
        (
            lambda h: (
                h.update(ranks=[[0, {}]] * 2000)
                or h["settings"].update(context_parallel=[2000, 0, 2])
            ),
            f"2000 recordings of 2000 ranks (at most {MAX_RANKS})",
        ),
        (lambda h: h["ranks"][1].__setitem__(0, 2**62), "expected"),
        (lambda h: h["ranks"][1].__setitem__(0, -3), "calls of a rank"),
        (lambda h: h["ranks"][0].__setitem__(0, 1), "expected"),
        (lambda h: h["ranks"][3].__setitem__(0, h["ranks"][3][0] - 1), "more in the arrays than"),
        (lambda h: h["ranks"][2].__setitem__(1, 7), "TypeError"),
        (lambda h: h.update(version=2), "expected"),
        (lambda h: h.update(version=4), "version 1 or 2 or 3"),
        (lambda h: h.pop("settings"), "settings of a manager belong to versions 2 and 3"),
    ],
)
def test_claims_of_a_file_of_ranks_are_refused(
    change: Callable[[dict[str, Any]], object], part: str, merged: Path
) -> None:
    assert part in claims(merged, change)


def test_whatever_is_changed_in_a_file_of_ranks_ends_well_or_in_an_error_of_ours(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, random = plain(merged), np.random.default_rng(1)
    header, arrays = header_of(content)
    seen = set()
    for turn in range(60):
        new = {name: values.copy() for name, values in arrays.items()}
        odd = header
        if turn % 2:
            odd = changed_header(random, header)
        else:
            values = new[list(new)[random.integers(len(new))]]
            values[random.integers(len(values))] = random.choice([-1, 0, 3, 2**20, 2**31 - 1])
        write(merged, odd, new)
        seen.add(main(["check", str(merged), "--max-mib", "8"]))
        capsys.readouterr()
    assert seen == {0, 1}


def test_more_files_than_ranks_can_be_are_refused_unread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["merge", *["absent.npz.xz"] * (MAX_RANKS + 1), "-o", "x.npz.xz"]) == 2
    assert f"recordings: expected at most {MAX_RANKS}, one a rank" in capsys.readouterr().err


PROCESS = """
import signal, sys
import torch.distributed as dist
from tests.recording.rank_files import Rank, serve

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)

class Told(Rank):
    # Rank 0 schedules; the others do what they are told, as an engine's workers do.
    def step(self, turn, rows, starts, positions):
        for values in (rows, starts, positions):
            if rank:
                values.fill_(-7)
            dist.broadcast(values, 0)
        if (turn, rank) == (33, 2):
            positions[0] += 1
        if turn == 36 + rank:
            signal.raise_signal(signal.SIGUSR2)
        super().step(turn, rows, starts, positions)

serve(Told(rank, size), 40)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_are_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "FUSED_SLOTS_RECORD_DIR": str(tmp_path),
        "FUSED_SLOTS_RECORD_SIGNAL": "usr2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), "3", str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **settings, "FUSED_SLOTS_RECORD": str(9 + 2 * rank)},
        )
        for rank in range(3)
    ]
    assert [process.wait(120) for process in processes] == [0] * 3
    files = sorted(map(str, tmp_path.glob("*.npz.xz")))
    assert [Path(file).name[:17] for file in files] == [f"fused_slots-rank{n}" for n in range(3)]
    merged = tmp_path / "all.npz.xz"
    assert main(["merge", *reversed(files), "-o", str(merged)]) == 1
    out = capsys.readouterr().out
    assert f"rank 1: calls 28 to 37 of 23 to 38 in {files[1]}, 6 left out" in out, out
    assert "step 7: rank 2 and ranks 0, 1 part in call 34: positions[0] (row " in out
    assert "ranks 0, 1: " not in out, "the others have no finding"
    assert main(["replay", str(merged)]) == 0
    assert main(["check", str(merged)]) == main(["check", *files]) == 1
    page = tmp_path / "page.html"
    assert main(["report", str(merged), "-o", str(page), "--cp-rank", "1"]) == 1
    assert "all 3 ranks, tables of rank 1" in page.read_text()
