"""Each kind of fault in a schedule is a finding that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import Append, ScheduleStep, load_recording
from fused_slots.recording.shipped import list_recordings
from tests.recording.small_schedules import schedule, with_truth

Spoil = Callable[[list[ScheduleStep]], list[ScheduleStep]]


@pytest.mark.parametrize("name", list_recordings())
def test_recordings_have_no_finding(name: str) -> None:
    assert list(ScheduleCheck(load_recording(name))) == []


def test_small_schedule_has_no_finding() -> None:
    assert list(ScheduleCheck(schedule())) == []


def over_capacity(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    appends = (*steps[2].appends, Append(0, ([12, 13, 14], [], [], []), False))
    return [*steps[:2], replace(steps[2], appends=appends)]


def row_twice(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    return [steps[0], replace(steps[1], idx_mapping=np.array([0, 0], np.int32)), steps[2]]


def request_twice(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    return [steps[0], replace(steps[1], request_ids=np.array([1, 1], np.int32)), steps[2]]


def other_block(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    return [*steps[:2], with_truth(steps[2], 0, 0, [1, 9])]


def fewer_blocks(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    return [*steps[:2], with_truth(steps[2], 1, 0, [0, 3])]


def null_written(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    return [*steps[:2], with_truth(steps[2], 1, 0, [0, 3, 0])]


def block_of_two_requests(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    first, other = steps[1].appends
    appends = (first, replace(other, block_ids=([1, 6], *other.block_ids[1:])))
    spoiled = replace(with_truth(steps[1], 0, 0, [1, 6]), appends=appends)
    return [steps[0], spoiled]


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (over_capacity, "step 2: row 0 of group 0 (full) holds 5 blocks, its capacity is 4"),
        (row_twice, "step 1: row 0 stands in the batch more than once"),
        (request_twice, "step 1: request 1 stands in the batch more than once"),
        (other_block, "step 2: row 0 of group 0 (full), column 1 is block 8, the KV manager says"),
        (fewer_blocks, "step 2: row 0 of group 1 (sliding) has 3 blocks, the KV manager 2"),
        (null_written, "step 2: row 0 of group 1 (sliding) writes column 2, where"),
        (
            block_of_two_requests,
            "step 1: block 6 is written by row 2 of group 0 (full) and by row 0 of group 0 (full)",
        ),
    ],
)
def test_fault_is_found(spoil: Spoil, finding: str) -> None:
    findings = list(ScheduleCheck(schedule(spoil)))
    assert any(text.startswith(finding) for text in findings), findings


def test_entry_without_tokens_writes_nothing() -> None:
    """The same spoiled entry is a finding with tokens, and none without."""
    starts, positions = np.array([0, 0, 1], np.int32), np.array([8])

    def without_tokens(steps: list[ScheduleStep]) -> list[ScheduleStep]:
        empty = replace(steps[1], query_start_loc=starts, positions=positions)
        return [steps[0], with_truth(empty, 0, 0, [1, 0])]

    def with_tokens(steps: list[ScheduleStep]) -> list[ScheduleStep]:
        return [steps[0], with_truth(steps[1], 0, 0, [1, 0])]

    assert list(ScheduleCheck(schedule(without_tokens))) == []
    assert list(ScheduleCheck(schedule(with_tokens))) == [
        "step 1: row 0 of group 0 (full) writes column 1, where the KV manager holds no block"
    ]
