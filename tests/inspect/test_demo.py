"""The demo's report adds up, and says so when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from fused_slots.inspect.demo import DemoReport, run_demo, sparkline
from fused_slots.inspect.pictures import Film
from fused_slots.recording.replay import MAX_MISMATCHES, Replay
from fused_slots.recording.shipped import DEFAULT_RECORDING, list_recordings
from tests.recording.small_schedules import schedule, with_truth


def demo_of(replay: Replay) -> DemoReport:
    return run_demo(replay, None, replay)


def report(**settings: int) -> DemoReport:
    return demo_of(Replay(schedule(), **settings))


def test_default_recording_ships_with_the_package() -> None:
    assert DEFAULT_RECORDING in list_recordings()


def test_document_accounts_for_every_slot() -> None:
    document = report(pad_requests_to=4, replay_window=1).document()
    mapped = sum(document["slots_mapped"].values())
    padded = sum(document["slots_padded"].values())
    assert mapped + padded == 3 * 4 * 16  # steps x groups x capacity
    assert document["slots_mapped"] == {"in a paged block": 22, "in a ring": 12}
    reasons = {reason: n for reason, n in document["slots_padded"].items() if n}
    assert reasons == {
        "tail behind the last token": 112,
        "group of mode NONE (state)": 20,
        "dummy request (graph padding)": 24,
        "replayed token of a shared block": 2,
    }
    assert sum(group["slots_mapped"] for group in document["groups"]) == mapped
    assert [group["blocks_in_use_max"] for group in document["groups"]] == [3, 4, 2, 2]
    assert [group["kind"] for group in document["groups"]] == ["paged", "paged", "state", "ring"]
    assert (document["steps"], document["tokens"], document["requests"]) == (3, 12, 2)
    assert document["launches"] == 3
    assert document["events"]["prefix hit"] == document["events"]["preempted"] == 1
    assert json.loads(json.dumps(document)) == document


def test_text_shows_the_numbers_of_the_document() -> None:
    text = report().text()
    assert "made by hand" in text
    assert "1 prefix hit, 1 preempted" in text
    for line in ("tail behind the last token", "sliding", "digest", "blocks in use over time"):
        assert line in text
    assert text.endswith(
        "Every gathered table and every slot equals the scalar reference and what the KV "
        "manager held."
    )


def test_mismatches_are_shown_with_their_derivation() -> None:
    spoiled = schedule(lambda steps: [with_truth(steps[0], 0, 0, [20]), *steps[1:]])
    bad = demo_of(Replay(spoiled))
    assert not bad.good
    assert "MISMATCHES, the first of them:" in bad.text()
    assert "the KV manager says 160" in bad.text()
    assert "block id = table[row, 0] = 2" in bad.text()
    document = bad.document()
    assert len(document["mismatches"]) == MAX_MISMATCHES <= document["num_mismatches"]


def test_empty_schedule_has_a_report() -> None:
    empty = demo_of(Replay(schedule(lambda steps: [])))
    assert empty.good
    assert empty.document()["microseconds_per_step"] == {"median": 0.0, "p20": 0.0, "p80": 0.0}
    assert "steps" in empty.text()


def test_picture_shows_the_steps_of_the_report(tmp_path: Path) -> None:
    film, replay = Film(schedule()), Replay(schedule())
    drawn = run_demo(replay, film, replay)
    drawn.picture = str(film.draw(tmp_path / "small.png"))
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    assert drawn.document()["picture"] == str(tmp_path / "small.png")
    assert f"picture {tmp_path / 'small.png'}" in drawn.text()


def test_sparkline_is_scaled_to_the_largest() -> None:
    assert sparkline([0, 7, 14]) == "▁▄█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
