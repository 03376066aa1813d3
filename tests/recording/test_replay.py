"""A replay finds every disagreement with its two oracles, and none where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fused_slots import BlockTableError, ContextParallel
from fused_slots.backends.cpu import CpuBackend
from fused_slots.recording.replay import MAX_MISMATCHES, Mismatch, Replay
from fused_slots.recording.schedule import Schedule, load_recording
from fused_slots.recording.shipped import list_recordings
from fused_slots.reference import Outcome
from tests.recording.small_schedules import schedule, with_truth


def mismatches(replay: Replay) -> list[Mismatch]:
    return [mismatch for step in replay for mismatch in step.mismatches]


@pytest.mark.parametrize("name", list_recordings())
def test_every_recording_replays_without_a_mismatch(name: str) -> None:
    replay = Replay(load_recording(name), pad_requests_to=8)
    assert mismatches(replay) == []
    assert replay.num_mismatches == 0
    assert replay.num_steps == replay.tables.launches == len(replay.schedule)
    # Every token of every group is accounted for once, mapped or padded.
    dummies = sum(counts[Outcome.DUMMY] for counts in replay.outcomes[:1])
    assert all(sum(c.values()) == replay.num_tokens + dummies for c in replay.outcomes)


def test_small_schedule_replays_and_counts_outcomes() -> None:
    replay = Replay(schedule())
    assert mismatches(replay) == []
    assert [dict(counts) for counts in replay.outcomes] == [
        {Outcome.PAGED: 12},
        {Outcome.PAGED: 12},
        {Outcome.STATE_GROUP: 12},
        {Outcome.RING: 12},
    ]
    assert replay.num_tail == 4 * (3 * 16 - 12)


def test_blocks_in_use_counts_shared_blocks_once_and_forgets_preempted_requests() -> None:
    used = [step.blocks_in_use for step in Replay(schedule())]
    # full: {1}, {1, 8, 6}, {1, 8}; sliding: {2, 3}, {2, 3, 9, 7}, {3, 9}.
    assert used == [(1, 2, 1, 1), (3, 4, 2, 2), (2, 2, 1, 1)]


def test_dummies_fill_the_batch_as_far_as_there_is_room() -> None:
    replay = Replay(schedule(), pad_requests_to=4)
    assert mismatches(replay) == []
    # Batches of 1, 2 and 1 requests become batches of 4.
    assert replay.outcomes[0][Outcome.DUMMY] == 3 + 2 + 3
    crowded = Replay(replace(schedule(), max_num_batched_tokens=9), pad_requests_to=4)
    assert mismatches(crowded) == []
    assert crowded.outcomes[0][Outcome.DUMMY] == 1 + 2 + 3


def test_replay_window_pads_shared_groups_after_a_prefix_hit() -> None:
    replay = Replay(schedule(), replay_window=1)
    assert mismatches(replay) == []
    replayed = [counts[Outcome.REPLAYED] for counts in replay.outcomes]
    assert replayed == [1, 1, 0, 0]


def test_ranks_of_a_context_parallel_replay_own_each_token_once() -> None:
    recording = load_recording("preemption")
    owned = 0
    for rank in range(2):
        replay = Replay(recording, context_parallel=ContextParallel(2, rank, 4))
        assert mismatches(replay) == []
        owned += replay.outcomes[0][Outcome.PAGED]
    assert owned == replay.num_tokens


def test_digest_is_the_same_again_and_differs_for_another_schedule() -> None:
    digests = []
    for recorded in (schedule(), schedule(), schedule(lambda steps: steps[:2])):
        replay = Replay(recorded)
        assert mismatches(replay) == []
        digests.append(replay.digest)
    assert digests[0] == digests[1] != digests[2]


def test_kv_manager_that_held_another_block_is_a_mismatch_with_a_derivation() -> None:
    spoiled = schedule(lambda steps: [with_truth(steps[0], 0, 0, [20]), *steps[1:]])
    replay = Replay(spoiled)
    found = [m for m in mismatches(replay) if m.step == 0]
    assert {m.oracle for m in found} == {"the KV manager"}
    table, slot = found[0], next(m for m in found if "slot" in m.what)
    assert (table.expected, table.actual) == (40, 2)
    assert "column 0 of batch entry 0" in table.what
    assert (slot.expected, slot.actual) == (160, 8)
    assert slot.derivation.endswith("slot = 8: a slot of a paged block")
    assert slot.derivation in str(slot)
    # One wrong block of two columns and eight tokens, seen by one oracle.
    assert replay.num_mismatches >= len(found) == 2 + 8


def test_kv_manager_that_held_fewer_blocks_is_a_mismatch() -> None:
    spoiled = schedule(lambda steps: [steps[0], with_truth(steps[1], 1, 1, [0, 3]), steps[2]])
    found = mismatches(Replay(spoiled))
    assert [(m.step, m.expected, m.actual) for m in found] == [(1, 0, 7)]


class _Wrong(CpuBackend):
    """A backend that spoils one element after each step; `where` chooses the buffer."""

    where = "slot"

    def step(self, *args: object) -> None:
        super().step(*args)  # type: ignore[arg-type]
        if self.where == "slot":
            self.slot_mappings[3, 0] += 1
        elif self.where == "tail":
            self.slot_mappings[0, -1] = 7
        elif self.where == "table":
            self.input_tables[1][0, 0] = 31
        elif self.where == "unused row":
            self.input_tables[2][-1, 0] = 5
        elif self.where == "fault":
            self._fault_counts[1, 0] += 1
        elif self.where == "source":
            self.tables[0][2, 0] = 30


@pytest.mark.parametrize(
    ("where", "what", "oracle"),
    [
        ("slot", "the slot of token 0", "the scalar reference"),
        ("slot", "the slot of token 0", "the KV manager"),
        ("tail", "the slot behind the last token, 15", "the contract"),
        ("table", "column 0 of batch entry 0", "the scalar reference"),
        ("unused row", "unused cell [3, 0]", "the contract"),
        ("fault", "the number of faults so far", "the scalar reference"),
        ("source", "integrity", "the contract"),
    ],
)
def test_wrong_backend_is_found(
    where: str, what: str, oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.block_tables.backend_class", lambda _: _Wrong)
    monkeypatch.setattr(_Wrong, "where", where)
    found = mismatches(Replay(schedule()))
    assert any(m.what.startswith(what) and m.oracle == oracle for m in found), found


def test_long_lists_of_mismatches_are_counted_but_not_kept() -> None:
    def spoil(recorded: Schedule) -> Schedule:
        steps = list(recorded)
        held = [[20 + g] * len(step) for g, step in enumerate([[0], [0, 0]])]
        return schedule(lambda _: [with_truth(with_truth(steps[0], 0, 0, held[0]), 1, 0, held[1])])

    replay = Replay(spoil(schedule()))
    step = next(iter(replay))
    assert len(step.mismatches) == MAX_MISMATCHES < replay.num_mismatches == 2 + 8 + 2 + 8


def test_a_null_block_that_is_never_written_is_counted_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block 3 of the sliding group is written by 4 of the 8 first tokens."""
    monkeypatch.setenv("FUSED_SLOTS_NULL_BLOCK", "3")
    replay = Replay(schedule())
    disagree = {(m.oracle, m.actual) for m in mismatches(replay)}
    assert disagree == {("the KV manager", -1)}
    assert replay.outcomes[1] == {Outcome.PAGED: 8, Outcome.NULL_BLOCK: 4}


def test_bad_batch_multiple_is_refused() -> None:
    with pytest.raises(BlockTableError, match="pad_requests_to: expected an int"):
        Replay(schedule(), pad_requests_to=0)


def test_block_tables_of_a_step_are_those_of_the_batch() -> None:
    last = list(Replay(schedule(), pad_requests_to=4))[-1]
    assert [table.shape[0] for table in last.block_tables] == [1, 1, 1, 1]
    assert last.block_tables[0][0, :4].tolist() == [2, 3, 16, 17]
    # 10 computed tokens, a reach of 4: column 0 lies below the window.
    assert last.block_tables[1][0, :3].tolist() == [0, 3, 9]
    assert last.microseconds > 0
    assert np.all(last.block_tables[3] == [[11]])
