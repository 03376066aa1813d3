"""The flight recorder: whatever a manager was asked, its recording replays to the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from bench import flight_recorder
from fused_slots import (
    AscendBlockTables,
    BlockTableError,
    ConfigurationError,
    ContextParallel,
    InvalidArgumentError,
    KVCacheGroup,
    SlotMappingMode,
)
from fused_slots.backends.base import Step
from fused_slots.cli import main
from fused_slots.recording.arrays import ScheduleError
from fused_slots.recording.as_scheduled import as_scheduled
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.check import FindingKind, ScheduleCheck
from fused_slots.recording.flight import GraphRing
from fused_slots.recording.repeat import state_digests
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import Schedule, load_schedule
from fused_slots.recording.steps import Append
from fused_slots.reference import Outcome
from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.v1 import MultiGroupBlockTable
from tests.backends_under_test import BACKENDS, MakeTables

GROUPS = [
    KVCacheGroup(16, 12, kernel_block_size=8, name="full"),
    KVCacheGroup(8, 20, sliding_window_reach=15, name="sliding"),
    KVCacheGroup(64, 3, slot_mapping_mode=SlotMappingMode.NONE, name="state"),
    KVCacheGroup(8, 1, circular=True, name="ring"),
]
ROWS, TOKENS = 6, 48


def build(
    cls: type[AscendBlockTables] = AscendBlockTables, **settings: object
) -> AscendBlockTables:
    return cls.from_groups(GROUPS, max_num_reqs=ROWS, max_num_batched_tokens=TOKENS, **settings)


def live(tables: AscendBlockTables, calls: int, seed: int) -> None:
    """Random calls of every kind, those with faults included."""
    with tables.device:  # where tensors are made
        _live(tables, calls, random.Random(seed))


def _live(tables: AscendBlockTables, calls: int, chance: random.Random) -> None:

    def ids(count: int) -> list[int]:
        return [chance.randrange(60) for _ in range(count)]

    def change_a_row() -> None:
        row, choice = chance.randrange(ROWS), chance.random()
        held = [
            int(n) // group.columns_per_block
            for n, group in zip(tables.num_blocks.np[:, row], GROUPS, strict=True)
        ]
        if choice < 0.15:
            tables.clear_row(row)
        elif choice < 0.3:
            first = [chance.randint(0, n) for n in held]
            tables.write_block_ids(
                row,
                first,
                [
                    ids(chance.randint(0, 1) if f < g.max_num_blocks else 0)
                    for f, g in zip(first, GROUPS, strict=True)
                ],
            )
        elif choice < 0.6:
            tables.append_block_ids(row, (ids(4), ids(6), ids(1), ids(1)), True)
        else:
            room = [min(g.max_num_blocks - n, 1) for n, g in zip(held, GROUPS, strict=True)]
            tables.append_block_ids(row, tuple(ids(chance.randint(0, n)) for n in room), False)

    for _ in range(calls):
        for _ in range(chance.randrange(4)):
            change_a_row()
        batch = chance.sample(range(-1, ROWS + 1), chance.randint(1, ROWS - 1))
        batch = [row for row in batch if row <= ROWS]
        dtype = chance.choice([torch.int32, torch.int64])
        rows = torch.tensor(batch, dtype=dtype)
        lengths = [chance.randint(0, TOKENS // len(batch)) for _ in batch]
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        firsts = [chance.randint(-2, 60) for _ in batch]
        positions = torch.tensor(
            [first + i for first, n in zip(firsts, lengths, strict=True) for i in range(n)]
            + [0] * chance.randrange(3),
            dtype=torch.int64,
        )
        computed = torch.tensor([chance.randrange(60) for _ in range(ROWS)], dtype=torch.int32)
        if chance.random() < 0.3:
            computed = None
        replay = {}
        if chance.random() < 0.3:
            replay["replay_start"] = torch.tensor(firsts, dtype=torch.int32)
            if chance.random() < 0.5:
                replay["replay_len"] = torch.full((len(batch),), 3, dtype=torch.int32)
        what = chance.randrange(7)
        if what <= 2:
            tables.step(rows, starts, positions, num_computed_tokens=computed, **replay)
            continue
        if what == 3:
            tables.apply_staged_writes()
            tables.gather_block_tables(rows, len(batch), num_computed_tokens=computed)
            tables.compute_slot_mappings(rows, starts, positions, TOKENS, **replay)
        elif what == 4:
            wide = torch.empty(4, TOKENS + 5, dtype=chance.choice([torch.int32, torch.int64]))
            tables.compute_slot_mappings(rows, starts, positions, TOKENS, out=wide, **replay)
        elif what == 5:
            tables.map_tokens(rows, positions[: len(batch)].new_full((len(batch),), 9))
        else:
            out = [torch.zeros(9, width, dtype=torch.int32) for width in tables.layout.widths]
            tables.gather_block_tables(rows, 8, out=out, num_computed_tokens=computed)


def replayed(schedule: Schedule, device: str = "cpu") -> Replay:
    replay = Replay(schedule, device=device)
    for step in replay:
        assert not step.mismatches, str(step.mismatches[0])
    assert not replay.num_mismatches
    return replay


@pytest.mark.parametrize("half", ["native", "python"])
@pytest.mark.parametrize("deferring", [False, True])
def test_a_ring_that_wrapped_replays_to_the_same_bits(
    half: str, deferring: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_HOST", half)
    monkeypatch.setenv("FUSED_SLOTS_RECORD", "20")
    for seed in range(4):
        tables = build(DeferringBlockTables if deferring else AscendBlockTables, replay_window=2)
        for life in range(6 if seed else 1):
            if isinstance(tables, DeferringBlockTables):
                with tables.defer_writes(), tables.fuse_gather():
                    live(tables, 20, seed * 10 + life)
            else:
                live(tables, 20, seed * 10 + life)
        path = tables.save_recording(tmp_path / f"{seed}.npz.xz")
        schedule = load_schedule(path)
        assert 20 <= len(schedule) <= 41
        assert (schedule.metadata["calls_before"] > 0) == (seed > 0)
        assert schedule.metadata["state"]["rows"] == state_digests(tables)["rows"]
        replayed(schedule)


@pytest.mark.parametrize("make_tables", BACKENDS, ids=str)
def test_a_run_of_any_backend_replays_on_any_other(
    make_tables: MakeTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_RECORD", "6")
    tables = make_tables(
        GROUPS, max_num_reqs=ROWS, max_num_batched_tokens=TOKENS, replay_window=2, null_block_id=5
    )
    live(tables, 14, 2)
    schedule = load_schedule(tables.save_recording(tmp_path / "x.npz.xz"))
    assert schedule.metadata["calls_before"] > 0
    digests = set()
    for other in BACKENDS:
        monkeypatch.setenv("FUSED_SLOTS_BACKEND", other.backend)
        digests.add(replayed(schedule, other.device).digest)
    assert len(digests) == 1


def test_a_call_is_recorded_as_it_was_made() -> None:
    tables = build(replay_window=1)
    tables.start_recording(9)
    rows = torch.tensor([4, -1, 9], dtype=torch.int64)
    starts = torch.tensor([0, 2, 2, 3, 77], dtype=torch.int32)
    positions = torch.tensor([7, 8, 2**40, 5], dtype=torch.int64)
    computed = torch.arange(ROWS, dtype=torch.int32)
    replay = torch.tensor([7, 1, 0], dtype=torch.int32)
    tables.step(
        rows,
        starts,
        positions,
        num_reqs_padded=5,
        num_tokens_padded=4,
        num_computed_tokens=computed,
        replay_start=replay,
        replay_len=replay + 1,
    )
    out = torch.zeros(4, 7, dtype=torch.int32)
    tables.compute_slot_mappings(rows, starts, positions, 3, out, replay)
    tables.map_tokens(rows.int(), positions[:3], tables.slot_mappings)
    step, mapped, drafted = schedule_of(tables)
    for recorded, given in (
        (step.idx_mapping, rows),
        (step.query_start_loc, starts[:4]),
        (step.positions, positions),
        (step.num_computed_tokens, computed),
        (step.call.replay_start, replay),
        (step.call.replay_len, replay + 1),
        (mapped.call.replay_start, replay),
        (drafted.idx_mapping, rows.int()),
        (drafted.positions, positions[:3]),
    ):
        assert recorded.dtype == given.numpy().dtype
        assert recorded.tolist() == given.tolist()
    sizes = (step.call.num_reqs_padded, step.call.num_tokens_padded, step.call.slots_width)
    assert (step.call.gathers, step.call.maps, step.call.has_computed) == (True, True, True)
    assert sizes == (5, 4, 0)
    assert (mapped.call.gathers, mapped.call.maps, mapped.call.slots_width) == (False, True, 7)
    assert (mapped.call.replay_len, mapped.call.has_computed) == (None, False)
    assert (drafted.call.drafts, drafted.call.into_steps) == (True, True)


@pytest.mark.parametrize(
    ("array", "item", "value", "message"),
    [
        ("write_rows", 0, ROWS, "write_rows: expected 0 <= value < 6 at item 0"),
        ("write_kinds", 0, 4, "write_kinds: expected 0 <= value < 4"),
        ("write_begins", 4, 2, "write 1 to row 1 of group 0 .full.: expected a begin in .0, 1."),
        ("write_counts", 0, 13, "write_blocks: expected .* items"),
        ("write_blocks", 0, 10, "write_blocks: expected 0 <= value < 10"),
        ("calls", 0, 2048, "kinds of calls: expected 0 <= value < 1024"),
        ("calls", 0, 64, r"calls.0.: expected a call that a manager has"),
        ("calls", 1, 2, "inputs: expected .* items"),
        ("calls", 3, -1, "calls: expected 0 <= value"),
        ("calls", 6, 2, "write_rows: expected 3 items; got 2"),
    ],
)
def test_arrays_that_cannot_be_are_refused_by_name(
    array: str, item: int, value: int, message: str, tmp_path: Path
) -> None:
    tables = build()
    tables.start_recording(9)
    rows, starts = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    tables.append_block_ids(1, ([1], [2], [3], [9]), True)
    tables.step(rows, starts, torch.tensor([3]))
    tables.write_block_ids(1, (1, 1, 1, 1), ([5], [], [], []))
    tables.step(rows, starts, torch.tensor([3]))
    schedule = schedule_of(tables)
    assert schedule._arrays["write_kinds"].tolist() == [1, 2]
    arrays = {name: values.copy() for name, values in schedule._arrays.items()}
    arrays[array].reshape(-1)[item] = value
    Schedule(**{**vars(schedule), "_arrays": arrays}).save(tmp_path / "changed.npz.xz")
    with pytest.raises(ScheduleError, match=message):
        load_schedule(tmp_path / "changed.npz.xz")


def test_two_requests_in_one_slot_are_a_finding_and_cut_rows_are_copied_whole() -> None:
    tables = build()
    tables.start_recording(9)
    rows, starts = torch.tensor([1, 2]), torch.tensor([0, 1, 2], dtype=torch.int32)
    for row, block in ((1, 4), (2, 5)):
        tables.append_block_ids(row, ([4, 6], [block], [block], [block]), True)
    tables.step(rows, starts, torch.tensor([3, 3]))
    tables.step(rows, starts, torch.tensor([3, 4]))
    tables.write_block_ids(1, (1, 1, 1, 1), ([], [], [], []))
    tables.apply_staged_writes()
    tables.gather_block_tables(rows, 2)
    check = CallCheck(schedule_of(tables))
    found = list(check)
    assert len(found) == 1, found
    finding = found[0]
    assert finding == (
        "step 0: slot 67 of group 0 (full) is written by row 2 (position 3) and by row 1"
    )
    assert (finding.row, finding.group, finding.block) == (2, 0, 4)
    assert check.copies == {"whole": 8 + 1, "nothing new": 8 + 7}


def test_a_recording_says_what_the_run_held(tmp_path: Path) -> None:
    """The comparison with the run can fail: another block in one row is found."""
    tables = build()
    tables.start_recording(10)
    live(tables, 3, 1)
    rows = torch.zeros(1, dtype=torch.int32)
    tables.append_block_ids(0, ([1], [2], [3], [4]), True)
    tables.step(rows, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3]))
    tables.block_tables[1].gpu[0, 0] = 5
    schedule = load_schedule(tables.save_recording(tmp_path / "x.npz.xz"))
    found = [str(mismatch) for step in Replay(schedule) for mismatch in step.mismatches]
    assert len(found) == 1, found
    assert "the digest of rows" in found[0]


def test_settings_and_context_parallelism_are_those_of_the_run(tmp_path: Path) -> None:
    groups = [KVCacheGroup(16, 9, name="full")]
    tables = AscendBlockTables.from_groups(
        groups,
        max_num_reqs=3,
        max_num_batched_tokens=40,
        context_parallel=ContextParallel(2, 1, 4),
        null_block_id=3,
        slot_dtype=torch.int32,
    )
    tables.start_recording(4)
    tables.append_block_ids(2, ([3, 7],), True)
    starts = torch.tensor([0, 40], dtype=torch.int32)
    _, slots = tables.step(torch.tensor([2]), starts, torch.arange(40))
    schedule = load_schedule(tables.save_recording(tmp_path / "cp.npz.xz"))
    replay = replayed(schedule)
    assert torch.equal(replay.tables.slot_mappings, slots)
    # Of the pool only the largest block is known.
    assert replay.tables.layout == replace(tables.layout, num_blocks=(8,))


def test_v1_rows_are_recorded_however_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_RECORD", "8")
    chance = random.Random(5)
    tables = MultiGroupBlockTable(
        max_num_reqs=4,
        max_num_batched_tokens=64,
        pin_memory=False,
        device="cpu",
        block_sizes=[16, 32],
        kernel_block_sizes=[16, 16],
        max_num_blocks=[8, 4],
        slot_mapping_modes=[SlotMappingMode.TOKEN_TO_KV_SLOT] * 2,
    )
    starts = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
    for turn in range(40):
        row = chance.randrange(4)
        tables.add_row([[chance.randrange(50)], [chance.randrange(50)]], row)
        tables.append_row([[chance.randrange(50)], []], row)
        choice = chance.randrange(5)
        if choice == 0:
            tables.swap_row(0, 3)
        elif choice == 1:
            tables.move_row(1, 2)
        elif choice == 2:
            tables[0].get_numpy_array()[:, 0] = turn % 7  # as runners do
        elif choice == 3:
            tables.clear_row(chance.randrange(4))
        tables.commit_block_table(chance.choice([3, 4]))
        positions = torch.tensor([chance.randrange(40) for _ in range(32)])
        tables.compute_slot_mapping(4, starts, positions)
        if turn % 3 == 0:
            tables.compute_slot_mapping_draft([0, 2, 3], [1, 2, 17])
    slots = tables[0].slot_mapping.gpu.clone()
    schedule = load_schedule(tables.manager.save_recording(tmp_path / "v1.npz.xz"))
    assert schedule.metadata["calls_before"] > 0
    assert schedule.metadata["rows_not_recorded"] == 0
    assert "slots" in schedule.metadata["state"]
    assert torch.equal(replayed(schedule).tables.slot_mappings[0], slots)


def test_lost_device_memory_begins_the_recording_anew(tmp_path: Path) -> None:
    tables = build()
    tables.start_recording(50)
    live(tables, 10, 3)
    tables.block_tables[1].gpu.fill_(2)
    tables.init_block_table_layout_tensors()
    before = tables.launches
    live(tables, 2, 4)
    schedule = load_schedule(tables.save_recording(tmp_path / "lost.npz.xz"))
    assert len(schedule) == tables.launches - before + 1  # the rows as they were
    replayed(schedule)


def test_nothing_is_touched_where_nothing_is_recorded() -> None:
    tables = build()
    assert not {"step", "map_slots", "map_tokens"} & vars(tables._backend).keys()
    with pytest.raises(InvalidArgumentError, match="FUSED_SLOTS_RECORD"):
        tables.save_recording("x")
    with pytest.raises(ConfigurationError, match="num_calls"):
        tables.start_recording(0)
    tables.start_recording(1)
    with pytest.raises(InvalidArgumentError, match="second call"):
        tables.start_recording(1)
    assert tables.recorder is not None
    assert tables.recorder.device_bytes > 0


def test_no_folder_is_made(tmp_path: Path) -> None:
    tables = build()
    tables.start_recording(1)
    with pytest.raises(FileNotFoundError):
        tables.save_recording(tmp_path / "new" / "x.npz.xz")
    assert not (tmp_path / "new").exists()


def one_fault(tables: AscendBlockTables) -> None:
    tables.step(
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([3]),
    )


def test_a_fault_of_a_chosen_kind_writes_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_RECORD", "5")
    monkeypatch.setenv("FUSED_SLOTS_RECORD_DIR", str(tmp_path))
    monkeypatch.setenv("FUSED_SLOTS_RECORD_FAULTS", "column_out_of_row")
    monkeypatch.setenv("RANK", "3")
    tables = build()
    tables.append_block_ids(0, ([1], [1], [1], [1]), True)
    one_fault(tables)
    assert not list(tmp_path.iterdir())
    for _ in range(5):
        tables.apply_staged_writes()
        tables.append_block_ids(0, ([], [], [], []), True)
    for _ in range(3):
        one_fault(tables)  # two groups of column faults, a ring's
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(f"fused_slots-rank3-pid{os.getpid()}-")
    schedule = load_schedule(file)
    assert schedule.metadata["reason"] == "for a fault"
    replay = replayed(schedule)
    assert replay.outcomes[0][Outcome.COLUMN_OUT_OF_ROW] == 1
    monkeypatch.setenv("FUSED_SLOTS_RECORD_FAULTS", "null_block")
    tables = build()
    for _ in range(10):
        one_fault(tables)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setenv("FUSED_SLOTS_RECORD_FAULTS", "nul_block")
    with pytest.raises(ConfigurationError, match="nul_block"):
        build()


def test_a_signal_writes_behind_the_next_call(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from tests.recording.test_flight import build, live, one_fault\n"
        "called = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: called.append(1))\n"
        "first, second = build(), build()\n"
        "live(first, 5, 1), live(second, 5, 2)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print(len(os.listdir(os.environ['FUSED_SLOTS_RECORD_DIR'])), called)\n"
        "one_fault(first), one_fault(second), one_fault(first)\n"
    )
    environment = {
        "FUSED_SLOTS_RECORD": "3",
        "FUSED_SLOTS_RECORD_DIR": str(tmp_path),
        "FUSED_SLOTS_RECORD_SIGNAL": "usr2",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[0] == "0 [1]", done.stdout
    files = sorted(tmp_path.iterdir())
    assert [file.name.rsplit("-", 1)[1] for file in files] == ["1.npz.xz", "2.npz.xz"]
    for file in files:
        replayed(load_schedule(file))


def test_a_signal_without_a_folder_changes_nothing_but_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_RECORD_SIGNAL", "usr1")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        tables = build()
        tables.start_recording(2)
        signal.raise_signal(signal.SIGUSR1)
        one_fault(tables)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "FUSED_SLOTS_RECORD_DIR is not set" in caplog.text


def test_replays_of_graphs_are_recorded_in_the_order_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: what a capture would put into the graph runs at once, and for each replay."""
    tables = build()
    tables.start_recording(8)
    recorder = tables.recorder
    assert recorder is not None
    recorder._graphs = GraphRing(tables.layout, tables.device, 8)
    rows, starts = torch.tensor([1, 0]), torch.tensor([0, 2, 3], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2])

    def replay() -> None:
        number, recorder._captured = len(recorder._captured), recorder._captured[:1]
        recorder._graphs.capture(0, [rows.view(torch.int32), starts, positions.view(torch.int32)])
        assert number == 1
        tables._backend.__class__.map_slots(tables._backend, Step(rows, starts, positions))

    tables.append_block_ids(0, ([1], [2], [3], [4]), True)
    tables.step(rows, starts, positions)
    recorder._is_capturing = lambda: True
    tables.compute_slot_mappings(rows, starts, positions, 3)
    recorder._is_capturing = lambda: False
    positions += 1
    replay()
    tables.append_block_ids(1, ([5], [6], [7], [8]), True)
    tables.apply_staged_writes()
    positions += 1
    replay()
    schedule = load_schedule(tables.save_recording(tmp_path / "graphs.npz.xz"))
    calls = [(step.call.graph, step.positions.tolist(), len(step.appends)) for step in schedule]
    assert calls == [
        (False, [0, 1, 2], 1),
        (True, [0, 1, 2], 0),
        (True, [1, 2, 3], 0),
        (False, [], 1),
        (True, [2, 3, 4], 0),
    ]
    assert torch.equal(replayed(schedule).tables.slot_mappings, tables.slot_mappings)
    for _ in range(20):  # the ring keeps the last ones, and those alone that are young enough
        replay()
    assert schedule_of(tables).metadata["calls_of_graphs"] == 8
    for _ in range(16):
        tables.append_block_ids(1, ([5], [6], [7], [8]), True)
        tables.apply_staged_writes()
    assert schedule_of(tables).metadata["calls_of_graphs"] == 0


def schedule_of(tables: AscendBlockTables) -> Schedule:
    assert tables.recorder is not None
    return tables.recorder.schedule("here")


def test_the_check_for_gpus_passes_on_the_cpu_and_can_fail() -> None:
    report = flight_recorder.verify("cpu")
    assert flight_recorder.is_good(report)
    stage = Append.stage

    def forgetful(append: Append, tables: AscendBlockTables) -> None:
        if append.req_index != 3:
            stage(append, tables)

    with mock.patch.object(Append, "stage", forgetful):
        assert not flight_recorder.is_good(flight_recorder.verify("cpu"))


def test_report_shows_a_run_and_its_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = build()
    tables.start_recording(40)
    live(tables, 30, 8)
    file = str(tables.save_recording(tmp_path / "run.npz.xz"))
    assert main(["check", file, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert any("column out of row in group 0 (full)" in text for text in document["findings"])
    assert document["calls"]["mapped"]["in a ring"] > 0
    assert document["calls"]["rows gathered"].keys() == {
        "whole",
        "nothing new",
        "new columns",
        "whole, into the caller's tables",
    }
    assert main(["report", file, "-o", str(tmp_path / "report.html")]) == 1
    assert "column out of row in group 0 (full)" in (tmp_path / "report.html").read_text()
    schedule = load_schedule(file)
    steps = list(as_scheduled(schedule))
    assert len(steps) == len(schedule)
    found = ScheduleCheck(as_scheduled(schedule))
    kinds = {FindingKind.ROW_LENGTH, FindingKind.OTHER_BLOCK, FindingKind.OVER_CAPACITY}
    assert not [finding for finding in found if finding.kind in kinds]
    assert sum(len(step.positions) for step in steps) > 100


def saved(tmp_path: Path) -> Path:
    tables = build()
    tables.start_recording(8)
    live(tables, 30, 11)
    return tables.save_recording(tmp_path / "saved.npz.xz")


def test_a_block_that_two_rows_can_read_is_a_finding_where_none_is_shared(tmp_path: Path) -> None:
    window = KVCacheGroup(
        *(16, 4), kernel_block_size=8, prefix_cacheable=False, sliding_window_reach=7, name="window"
    )
    tables = AscendBlockTables.from_groups(
        [window, KVCacheGroup(16, 4, name="full")], max_num_reqs=4, max_num_batched_tokens=8
    )
    tables.start_recording(10)
    for row, ids in enumerate(([7, 3], [2, 7])):
        tables.append_block_ids(row, [ids, ids], overwrite=True)
    rows, starts = torch.tensor([0, 1, 9]), torch.zeros(4, dtype=torch.int32)
    for computed in (22, 23):  # 23 - 7 = 16: block 0 lies below
        tables.step(
            *(rows, starts, torch.zeros(0, dtype=torch.int64)),
            num_computed_tokens=torch.tensor([computed, 0, 0, 0], dtype=torch.int32),
        )
    tables.gather_block_tables(rows, 3)
    tables.save_recording(tmp_path / "run.npz.xz")
    found = list(CallCheck(load_schedule(tmp_path / "run.npz.xz")))
    text = "block 7 of group 0 (window), which shares none, is held by row 0 and by row 1"
    shared = "block 7 of group 1 (full) is in column 0 of row 0 and column 1 of row 1"
    # Without num_computed_tokens nobody knows which blocks of a row have left a window.
    assert found == [f"step 0: {text}", f"step 0: {shared}", f"step 1: {shared}", f"step 2: {text}"]
    kinds = [FindingKind.HELD_TWICE, *[FindingKind.TWO_COLUMNS] * 2, FindingKind.HELD_TWICE]
    assert [finding.kind for finding in found] == kinds


def test_reading_again_gives_the_same_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path)
    load_schedule(path).save(tmp_path / "again.npz.xz")
    assert (tmp_path / "again.npz.xz").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "array",
    [
        "calls",
        "inputs",
        "write_rows",
        "write_kinds",
        "write_begins",
        "write_counts",
        "write_blocks",
    ],
)
def test_whatever_is_changed_in_the_arrays_ends_in_an_error_of_ours(
    array: str, tmp_path: Path
) -> None:
    schedule = load_schedule(saved(tmp_path))
    chance = np.random.default_rng(0)
    for _ in range(12):
        arrays = {name: values.copy() for name, values in schedule._arrays.items()}
        values = arrays[array].reshape(-1)
        places = chance.integers(0, len(values), 2)
        values[places] = chance.choice([-(2**31), -1, 0, 1, 7, 63, 1023, 2**20, 2**31 - 1], 2)
        changed = Schedule(**{**vars(schedule), "_arrays": arrays})
        changed.save(tmp_path / "changed.npz.xz")
        try:
            read = load_schedule(tmp_path / "changed.npz.xz", 16 << 20)
            list(CallCheck(read))
            for _ in Replay(read):
                pass
        except BlockTableError:
            pass


def test_blocks_beyond_a_known_pool_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended ids are checked at once; rows that a runner writes itself are not."""
    monkeypatch.setenv("FUSED_SLOTS_RECORD", "9")
    tables = MultiGroupBlockTable(
        max_num_reqs=4,
        max_num_batched_tokens=64,
        pin_memory=False,
        device="cpu",
        block_sizes=[16, 32],
        kernel_block_sizes=[16, 16],
        max_num_blocks=[8, 4],
        slot_mapping_modes=[SlotMappingMode.TOKEN_TO_KV_SLOT] * 2,
    )
    tables.manager.resize_pools([None, 12])  # as the plugin does when the engine knows
    tables.add_row([[40], [11]], 1)
    tables.add_row([[41], [3, 4]], 2)
    tables.commit_block_table(3)
    rows = tables[1].get_numpy_array()
    rows[2, 0:4] = [24, 25, 30, 31]  # blocks 12 and 15
    tables.commit_block_table(3)
    schedule = load_schedule(tables.manager.save_recording(tmp_path / "pool.npz.xz"))
    assert schedule.settings is not None
    assert schedule.settings["num_blocks"] == [None, 12]
    (finding,) = CallCheck(schedule)
    assert finding == (
        f"step {len(schedule) - 1}: row 2 of group 1 is given block 12 and 1 more, its pool has 12"
    )
    assert finding.kind is FindingKind.OUT_OF_POOL
    assert (finding.row, finding.group, finding.block) == (2, 1, 12)
    replayed(schedule)
    unknown = replace(schedule, settings={**schedule.settings, "num_blocks": [None, None]})
    assert not list(CallCheck(unknown))


def test_recordings_that_name_no_pools_are_read(tmp_path: Path) -> None:
    """Those of before pools were recorded."""
    schedule = load_schedule(saved(tmp_path))
    settings = dict(schedule.settings or {})
    assert settings.pop("num_blocks") == [None] * 4
    replace(schedule, settings=settings).save(tmp_path / "old.npz.xz")
    assert load_schedule(tmp_path / "old.npz.xz").settings == schedule.settings
    for odd in ([1], [0] * 4, ["7"] * 4, 7, [2**40] * 4):
        replace(schedule, settings={**settings, "num_blocks": odd}).save(tmp_path / "odd.npz.xz")
        with pytest.raises(ScheduleError):
            load_schedule(tmp_path / "odd.npz.xz")
