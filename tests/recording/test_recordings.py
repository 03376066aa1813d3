"""The recordings that ship: rows against the KV manager of the vLLM that made them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from bench.recording import recorder
from bench.recording.recorder import find_scenario, record
from bench.recording.scenarios import SCENARIOS, RecordingError
from fused_slots.groups import SlotMappingMode
from fused_slots.recording import shipped
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import (
    Append,
    Schedule,
    ScheduleError,
    ScheduleStep,
    load_recording,
)
from fused_slots.recording.shipped import list_recordings

EVENT_COUNTS = {
    "finished": "requests_finished",
    "preempted": "preemptions",
    "resumed": "resumptions",
    "prefix": "prefix_hits",
    "aborted": "aborts",
}


def test_every_scenario_ships_and_all_of_them_are_small() -> None:
    assert list_recordings() == tuple(sorted(scenario.name for scenario in SCENARIOS))
    folder = Path(shipped.__file__).parent
    assert sum(file.stat().st_size for file in folder.glob("*.npz.xz")) < 1_000_000
    assert sum(len(load_recording(name)) for name in list_recordings()) >= 1500


@pytest.mark.parametrize("name", list_recordings())
def test_rows_hold_what_the_kv_manager_holds(name: str) -> None:
    check = ScheduleCheck(load_recording(name))
    assert list(check) == []
    assert check.num_columns > 300_000


@pytest.mark.parametrize("name", list_recordings())
def test_what_the_scenario_exists_for_happened(name: str) -> None:
    recording = load_recording(name)
    counts = recording.metadata["counts"]
    assert all(counts[count] > 0 for count in find_scenario(name).must_happen)
    steps = list(recording)
    events = Counter(event.split()[0] for step in steps for event in step.events)
    for event, count in EVENT_COUNTS.items():
        # The last events may come after the last recorded step.
        assert events[event] <= counts[count] <= events[event] + 1, event
    assert counts["steps"] == len(steps)
    assert counts["tokens"] == sum(len(step.positions) for step in steps)
    assert counts["max_batch"] == max(len(step.idx_mapping) for step in steps)


@pytest.mark.parametrize("name", list_recordings())
def test_a_request_goes_on_where_it_stopped_or_where_drafts_were_rejected(name: str) -> None:
    recording = load_recording(name)
    drafts = recording.metadata["draft_tokens"]
    ends: dict[int, tuple[int, int]] = {}
    steps_back = 0
    for step in recording:
        for append in step.appends:
            if append.overwrite:
                ends.pop(append.req_index, None)
        bounds = zip(step.query_start_loc[:-1], step.query_start_loc[1:], strict=True)
        for row, (start, end) in zip(step.idx_mapping.tolist(), bounds, strict=True):
            first, last = int(step.positions[start]), int(step.positions[end - 1])
            assert first == step.num_computed_tokens[row]
            if row in ends:
                previous_first, previous_end = ends[row]
                assert max(previous_first + 1, previous_end - drafts) <= first <= previous_end
                steps_back += first < previous_end
            ends[row] = first, last + 1
    assert (steps_back > 0) == (drafts > 0)


def test_the_recordings_together_have_every_kind_of_group() -> None:
    groups = [group for name in list_recordings() for group in load_recording(name).groups]
    assert any(group.circular for group in groups)
    assert any(group.sliding_window_reach for group in groups)
    states = [group for group in groups if group.slot_mapping_mode is SlotMappingMode.NONE]
    assert {group.max_num_blocks == 1 for group in states} == {True, False}
    assert len({group.block_size for group in load_recording("prefix_hits").groups}) > 1


def spoiled(recording: Schedule, index: int, step: ScheduleStep) -> Schedule:
    steps = list(recording)
    steps[index] = step
    return Schedule.from_steps(
        steps,
        name=recording.name,
        groups=recording.groups,
        max_num_reqs=recording.max_num_reqs,
        max_num_batched_tokens=recording.max_num_batched_tokens,
        num_blocks=recording.num_blocks,
        metadata=recording.metadata,
    )


def first_finding(schedule: Schedule) -> str:
    return next(iter(ScheduleCheck(schedule)))


def test_a_wrong_block_in_an_append_is_found() -> None:
    recording = load_recording("preemption")
    step = recording[0]
    first, *others = step.appends
    blocks = [list(ids) for ids in first.block_ids]
    blocks[0][0] += 1
    wrong = replace(step, appends=(replace(first, block_ids=tuple(blocks)), *others))
    assert re.match(
        r"step 0: row \d+ of group 0 \(full 0\), column 0 is block \d+, the KV manager says \d+",
        first_finding(spoiled(recording, 0, wrong)),
    )


def test_a_forgotten_append_is_found() -> None:
    recording = load_recording("preemption")
    index, step = next(
        (index, step)
        for index, step in enumerate(recording)
        if any(not append.overwrite for append in step.appends)
    )
    kept = tuple(append for append in step.appends if append.overwrite)
    finding = first_finding(spoiled(recording, index, replace(step, appends=kept)))
    assert re.match(rf"step {index}: row \d+ of group .* has \d+ blocks, the KV manager", finding)


def test_a_resumed_request_appended_to_its_old_row_is_found() -> None:
    recording = load_recording("preemption")
    index, step = next(
        (index, step)
        for index, step in enumerate(recording)
        if any(event.startswith("resumed") for event in step.events)
    )
    kept = tuple(Append(a.req_index, a.block_ids, overwrite=False) for a in step.appends)
    finding = first_finding(spoiled(recording, index, replace(step, appends=kept)))
    assert finding.startswith(f"step {index}: row ")


@pytest.mark.parametrize(
    ("column_of", "verb"),
    [
        (lambda step, group: int(step.positions[0]) // group.block_size, "writes"),
        (
            lambda step, group: (
                max(int(step.positions[0]) - group.sliding_window_reach, 0) // group.block_size
            ),
            "reads",
        ),
    ],
)
def test_a_block_freed_while_tokens_need_it_is_found(column_of, verb) -> None:
    recording = load_recording("chunked_prefill")
    index, step, group = 300, recording[300], recording.groups[1]
    column = column_of(step, group)
    step.expected_blocks[1][0][column] = 0
    assert re.match(
        rf"step 300: row \d+ of group 1 \(.*\) {verb} column {column}, where the KV manager holds",
        first_finding(spoiled(recording, index, step)),
    )


def test_a_block_written_for_two_requests_is_found() -> None:
    recording = load_recording("chunked_prefill")
    step = recording[0]
    first, second = step.appends[:2]
    same = replace(second, block_ids=first.block_ids)
    where = {row: entry for entry, row in enumerate(step.idx_mapping.tolist())}
    held = [list(group) for group in step.expected_blocks]
    for group in held:
        group[where[second.req_index]] = group[where[first.req_index]].copy()
    wrong = replace(
        step,
        appends=(first, same, *step.appends[2:]),
        expected_blocks=tuple(tuple(group) for group in held),
    )
    finding = first_finding(spoiled(recording, 0, wrong))
    assert re.match(r"step 0: block \d+ is written by row \d+ of .* and by row \d+ of", finding)


def test_an_unknown_recording_or_scenario_names_those_there_are() -> None:
    with pytest.raises(ScheduleError, match=r"async_scheduling, .*got 'nothing'"):
        load_recording("nothing")
    with pytest.raises(RecordingError, match=r"chunked_prefill, .*got 'nothing'"):
        record("nothing", "never written")


@pytest.mark.parametrize("found", [None, "0.32.1"])
def test_recording_without_the_right_vllm_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str | None
) -> None:
    def version(distribution: str) -> str:
        assert distribution == "vllm"
        if found is None:
            raise metadata.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(recorder.metadata, "version", version)
    with pytest.raises(RecordingError, match=f"version 0.33.0 installed; got {found or 'no vllm'}"):
        record("preemption", tmp_path / "never_written")
    assert not (tmp_path / "never_written").exists()


def test_looking_at_recordings_needs_no_vllm_and_no_triton() -> None:
    program = (
        "import sys\n"
        "import bench.recording.recorder\n"
        "from fused_slots.recording.check import ScheduleCheck\n"
        "from fused_slots.recording.schedule import load_recording\n"
        "assert not list(ScheduleCheck(load_recording('preemption')))\n"
        "assert not {'vllm', 'triton'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_positions_and_offsets_have_the_types_that_a_runner_passes() -> None:
    step = load_recording("async_speculative")[10]
    assert step.positions.dtype == np.int64
    assert {step.idx_mapping.dtype, step.query_start_loc.dtype} == {np.dtype(np.int32)}
