"""Each kind of fault in a schedule is a finding that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fused_slots.recording.check import FindingKind, ScheduleCheck
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


def ring_of_two_requests(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    """Both hold ring 5, and only one has tokens in this step."""
    first, other = steps[1].appends
    appends = (first, replace(other, block_ids=(*other.block_ids[:3], [5])))
    quiet = {"query_start_loc": np.array([0, 0, 1], np.int32), "positions": np.array([8])}
    return [steps[0], replace(with_truth(steps[1], 3, 0, [5]), appends=appends, **quiet)]


def block_in_two_columns(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    """The hit is in column 0 of one request and was appended to another as its column 1."""
    first, other = steps[1].appends
    appends = (replace(first, block_ids=([1], *first.block_ids[1:])), other)
    return [steps[0], replace(with_truth(steps[1], 0, 1, [1, 1]), appends=appends)]


def block_of_two_groups(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    """Group 1 holds block 1 below its window, which group 0 has."""
    first, other = steps[1].appends
    appends = (first, replace(other, block_ids=([1, 8], [1, 3, 9], [10], [11])))
    return [steps[0], replace(with_truth(steps[1], 1, 0, [1, 3, 9]), appends=appends)]


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
        (
            ring_of_two_requests,
            "step 1: block 5 of group 3 (ring), which shares none, is held by row 0 and by row 2",
        ),
        (
            block_in_two_columns,
            "step 1: block 1 of group 0 (full) is in column 0 of row 0 and column 1 of row 2",
        ),
        (block_of_two_groups, "step 1: block 1 is held in group 0 (full) and in group 1 (sliding)"),
    ],
)
def test_fault_is_found(spoil: Spoil, finding: str) -> None:
    findings = list(ScheduleCheck(schedule(spoil)))
    assert any(text.startswith(finding) for text in findings), findings


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (over_capacity, (FindingKind.OVER_CAPACITY, 2, 0, 0, -1, -1)),
        (other_block, (FindingKind.OTHER_BLOCK, 2, 0, 0, 1, -1)),
        (block_of_two_requests, (FindingKind.WRITTEN_TWICE, 1, 2, 0, 1, 6)),
        (ring_of_two_requests, (FindingKind.HELD_TWICE, 1, 0, 3, -1, 5)),
        (block_in_two_columns, (FindingKind.TWO_COLUMNS, 1, 2, 0, -1, 1)),
        (block_of_two_groups, (FindingKind.HELD_TWICE, 1, -1, 1, -1, 1)),
    ],
)
def test_finding_says_where_it_is(spoil: Spoil, expected: tuple[object, ...]) -> None:
    found = [
        (finding.kind, finding.step, finding.row, finding.group, finding.column, finding.block)
        for finding in ScheduleCheck(schedule(spoil))
    ]
    assert expected in found


def test_every_kind_says_what_it_means() -> None:
    assert all(len(kind.value) > 50 for kind in FindingKind)


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
