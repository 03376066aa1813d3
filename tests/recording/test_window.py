"""A part of a schedule goes on from the rows as they stood."""

from __future__ import annotations

import numpy as np

from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import load_recording
from fused_slots.recording.window import step_bytes, window


def test_sizes_of_steps_add_up_to_the_arrays() -> None:
    recording = load_recording("prefix_hits")
    arrays = sum(values.nbytes for values in recording.arrays.values())
    texts = sum(len(text) for texts in recording.events.values() for text in texts)
    assert step_bytes(recording).sum() == arrays + texts


def test_part_is_as_sound_as_the_whole() -> None:
    part, num_rows_before = window(load_recording("async_speculative"), 150, 163)
    assert len(part) == 14
    assert num_rows_before > 20
    assert list(ScheduleCheck(part)) == []
    replay = Replay(part)
    assert not [mismatch for replayed in replay for mismatch in replayed.mismatches]


def test_part_has_the_steps_of_the_whole() -> None:
    recording = load_recording("preemption")
    steps = list(recording)[200:210]
    part, num_rows_before = window(recording, 200, 209)
    for index, (step, expected) in enumerate(zip(part, steps, strict=True)):
        assert step.appends[num_rows_before if index == 0 else 0 :] == expected.appends
        assert step.events == expected.events
        for name in ("request_ids", "idx_mapping", "query_start_loc", "positions"):
            assert np.array_equal(getattr(step, name), getattr(expected, name)), name
        for held, expected_held in zip(step.expected_blocks, expected.expected_blocks, strict=True):
            assert all(map(np.array_equal, held, expected_held))


def test_first_step_and_whole_schedule_need_no_rows_before() -> None:
    recording = load_recording("preemption")
    part, num_rows_before = window(recording, 0, len(recording) - 1)
    assert num_rows_before == 0
    assert all(np.array_equal(part.arrays[name], recording.arrays[name]) for name in part.arrays)
