"""The picture shows what was gathered: owners, shared blocks, null blocks, events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fused_slots import BlockTableError
from fused_slots.inspect import pictures
from fused_slots.inspect.pictures import Film, table_image
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import Schedule, ScheduleStep, load_recording
from tests.recording.small_schedules import schedule


def film(recorded: Schedule) -> Film:
    taken = Film(recorded)
    for step in Replay(recorded):
        taken.add(step)
    return taken


def test_cells_tell_owner_shared_null_and_unfilled() -> None:
    columns = {0: np.array([5, 0, 7]), 2: np.array([5, 9, 9])}
    image = table_image(columns, {0: 10, 2: 11}, num_rows=3, width=4)
    white, grey = (1.0, 1.0, 1.0), pictures._FREED
    assert tuple(image[0, 1]) == grey
    assert tuple(image[0, 3]) == tuple(image[1, 0]) == white
    mine, other = image[0, 2], image[2, 1]
    assert not np.allclose(mine, other)
    # Block 5 is in two rows; block 9 twice in one row, which is not shared.
    assert np.allclose(image[0, 0], mine * 0.45)
    assert np.allclose(image[2, 0], other * 0.45)
    assert np.allclose(image[2, 2], other)


def test_snapshots_show_the_gathered_rows_of_their_step() -> None:
    taken = film(schedule())
    last = taken._snapshots[-1]
    assert last.step == 2
    assert last.row_owner == {0: 1}
    assert last.columns[0][0].tolist() == [2, 3, 16, 17]
    assert last.columns[1][0].tolist() == [0, 3, 9]


def test_rows_and_events_are_placed_where_the_request_was() -> None:
    taken = film(schedule())
    assert taken._owners.T.tolist() == [[-1, -1, 0, -1], [1, -1, 0, -1], [1, -1, -1, -1]]
    assert taken._events == [("prefix hit", 1, 0), ("preempted", 2, 2)]


def test_event_of_a_request_that_has_no_row_yet_is_left_out() -> None:
    def unknown(steps: list[ScheduleStep]) -> list[ScheduleStep]:
        return [replace(steps[0], events=("aborted 77",)), *steps[1:]]

    assert film(schedule(unknown))._events == film(schedule())._events


def test_recording_with_every_event_is_drawn(tmp_path: Path) -> None:
    taken = film(load_recording("async_scheduling"))
    assert {kind for kind, _, _ in taken._events} == set(pictures._MARKERS)
    assert len(taken._snapshots) == pictures.NUM_SNAPSHOTS
    path = taken.draw(tmp_path / "tables.svg")
    text = path.read_text()
    assert text.lstrip().startswith("<?xml")
    assert text.count("<image") >= 1 + 4 * pictures.NUM_SNAPSHOTS


def test_schedule_without_events_is_drawn(tmp_path: Path) -> None:
    taken = film(schedule(lambda steps: steps[:1]))
    assert taken.draw(tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(BlockTableError, match="matplotlib; got not installed"):
        film(schedule()).draw(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
