"""Attacks on a gather that copies only what changed, and on writes that a step reads as it stages.

Kernels keep per batch entry what they copied last and skip the rest; each test makes that memory
wrong in one way. Right is always what a full copy of the rows gives.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.backends_under_test import BACKENDS, MakeTables
from tests.kernels.full_copy import GROUPS, ROWS, FullCopy


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    backend: MakeTables = request.param
    return backend


@pytest.fixture(params=["one call", "three calls"])
def one_call(request: pytest.FixtureRequest) -> bool:
    return request.param == "one call"


@pytest.fixture
def life(make_tables: MakeTables, one_call: bool) -> FullCopy:
    """Four requests in a batch that was gathered once."""
    life = FullCopy(make_tables, GROUPS, one_call)
    for row in range(4):
        life.start(row, row + 1)
    life.run([0, 1, 2, 3])
    return life


def test_appends_show_in_every_group(life: FullCopy) -> None:
    life.append(0)
    life.append(2, 3)
    life.run([0, 1, 2, 3])
    life.run([0, 1, 2, 3])


def test_overwrite_and_append_in_one_step(life: FullCopy) -> None:
    life.start(1, 2)
    life.append(1, 2)
    life.run([0, 1, 2, 3])
    life.append(1)
    life.start(1, 1)
    life.run([0, 1, 2, 3])


def test_overwrite_with_as_many_columns(life: FullCopy) -> None:
    """The same row in the same slot with the same extent, and yet all of it is new."""
    for row in range(4):
        life.start(row, row + 1)
    life.run([0, 1, 2, 3])


def test_overwrite_with_nothing(life: FullCopy) -> None:
    life.start(3, 0)
    life.run([0, 1, 2, 3])
    life.append(3, 2)
    life.run([0, 1, 2, 3])


def test_overwrite_twice_between_two_gathers(life: FullCopy) -> None:
    life.start(2, 3)
    life.start(2, 3)
    life.run([0, 1, 2, 3])
    life.start(2, 3)
    life.tables.apply_staged_writes()
    life.start(2, 3)
    life.run([0, 1, 2, 3])


def test_shrinking_rows_leave_no_tail(life: FullCopy) -> None:
    for count in (6, 4, 1, 0):
        life.start(3, count)
        life.run([0, 1, 2, 3])


def test_some_groups_only(life: FullCopy) -> None:
    for g in range(len(GROUPS)):
        life.append(1, [int(g == other) for other in range(len(GROUPS))])
        life.run([0, 1, 2, 3])


def test_batch_slots_swap_and_shift(life: FullCopy) -> None:
    for batch in ([1, 0, 2, 3], [3, 1, 0, 2], [2, 3], [0, 1, 2, 3], [1, 2, 3], [3, 2, 1, 0]):
        life.append(batch[0])
        life.run(batch)


def test_row_overwritten_while_away_comes_back_to_its_slot(life: FullCopy) -> None:
    life.run([0, 1, 2])
    life.start(3, 4)
    life.run([0, 1, 2])
    life.run([0, 1, 2, 3])
    life.run([0, 1])
    life.start(3, 4)
    life.run([0, 1, 2, 3])


def test_row_grown_while_away_comes_back_to_its_slot(life: FullCopy) -> None:
    life.run([0, 1, 2])
    life.append(3)
    life.run([0, 1, 2])
    life.append(3)
    life.run([0, 1, 2, 3])


def test_slot_is_taken_by_another_row_and_given_back(life: FullCopy) -> None:
    life.run([0, 1, 2, -1])
    life.run([0, 1, 2, 3])
    life.run([3, 3, 3, 3])
    life.append(3)
    life.run([0, 1, 2, 3])


def test_preempted_row_is_reused_by_another_request(life: FullCopy) -> None:
    life.run([0, 1, 2])
    life.start(3, 5)
    life.start(1, 2)
    life.run([0, 3, 2, 1])
    life.start(0, 1)
    life.run([3, 0, 2, 1])


def test_repeated_rows(life: FullCopy) -> None:
    life.run([2, 2, 1, 2])
    life.append(2)
    life.run([2, 2, 1, 2])
    life.start(2, 1)
    life.run([1, 2, 2, 2, 2])


def test_dummies_between_requests(life: FullCopy) -> None:
    life.run([-1, 0, -1, 3], padded=6)
    life.append(0)
    life.run([0, -1, 1, -1, -1, 2], padded=7)
    life.run([-1, -1])
    life.run([0, 1, 2, 3])


def test_padding_shrinks_and_grows(life: FullCopy) -> None:
    for batch, padded in (
        ([0, 1], ROWS), ([0, 1, 2, 3], 4), ([0], 1), ([0, 1, 2], 9), ([], 0), ([3, 1], 2), ([], 5),
    ):  # fmt: skip
        life.run(batch, padded)


def test_rows_written_but_not_in_the_batch(life: FullCopy) -> None:
    for row in range(4, ROWS):
        life.start(row, 2)
    life.append(1)
    life.run([0, 1, 2, 3])
    for row in range(4, ROWS):
        life.append(row)
    life.run(list(range(ROWS)))


@pytest.mark.parametrize("scribbled", [0, 2, 4, ROWS])
def test_callers_scribble_over_dummy_tables(life: FullCopy, scribbled: int) -> None:
    life.dummy(scribbled)
    life.run([0, 1])
    life.dummy(scribbled)
    life.append(0)
    life.start(1, 1)
    life.run([0, 1, 2, 3], computed=20)
    life.dummy(ROWS)
    life.dummy(1)
    life.run([3])


def test_scribbled_rows_of_a_wide_batch_are_clean_after_a_narrow_one(life: FullCopy) -> None:
    for row in range(ROWS):
        life.start(row, row)
    life.run(list(range(ROWS)))
    life.dummy(3)
    life.run([9], padded=1)
    life.run(list(range(ROWS)))


def test_window_advances_falls_back_and_is_absent(life: FullCopy) -> None:
    for row in range(4):
        life.start(row, 9)
    for computed in (0, 9, 14, 15, 22, 40, 1000, 22, 14, None, 14, 0, 30, None):
        life.run([0, 1, 2, 3], computed=computed)


def test_window_advances_while_the_row_grows_and_shrinks(life: FullCopy) -> None:
    for count, computed in ((9, 30), (2, 30), (2, 12), (7, 12), (7, 26), (0, 26), (9, 0), (9, 26)):
        life.start(0, count)
        life.append(1)
        life.run([1, 0, 2, 3], computed=computed)
        life.append(0)
        life.run([1, 0, 2, 3], computed=computed + 4)


def test_window_of_another_request_in_the_slot(life: FullCopy) -> None:
    for row in (0, 1):
        life.start(row, 9)
    life.run([0, 1], computed=30)
    life.run([1, 0], computed=30)
    life.start(1, 9)
    life.run([1, 0], computed=14)
    life.run([1, 0])


def test_gather_into_the_callers_tables_between_steps(life: FullCopy) -> None:
    life.append(0)
    life.gather_out([0, 3, 3, -1, 1], computed=20)
    life.run([0, 1, 2, 3], computed=20)
    life.gather_out([])
    life.start(2, 2)
    life.gather_out(list(range(ROWS)) * 2)
    life.run([0, 1, 2, 3])


def test_calls_of_both_kinds_take_turns(life: FullCopy) -> None:
    for turn in range(6):
        life.one_call = not life.one_call
        life.append(turn % 4)
        if turn % 2:
            life.start((turn + 1) % 4, turn)
            life.tables.apply_staged_writes()
        life.run([turn % 4, 1, 3], padded=turn + 3)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(make_tables: MakeTables, one_call: bool, seed: int) -> None:
    rng = Random(seed)
    life = FullCopy(make_tables, GROUPS, one_call)
    for _ in range(12):
        for row in rng.sample(range(ROWS), rng.randint(0, 4)):
            counts = [rng.randint(0, 4) for _ in GROUPS]
            life.write(row, counts, overwrite=rng.random() < 0.3)
        event = rng.random()
        batch = [rng.randint(-1, ROWS - 1) for _ in range(rng.randint(0, ROWS))]
        computed = rng.choice((None, rng.randint(0, 60)))
        if event < 0.15:
            life.dummy(rng.randint(0, ROWS))
        elif event < 0.25:
            life.gather_out(batch, computed)
        elif event < 0.35:
            life.tables.apply_staged_writes()
        life.one_call = one_call ^ (rng.random() < 0.3)
        life.run(batch, rng.randint(len(batch), ROWS), computed)
