"""The time model on traces by hand, and on the public kernels whose times it was fitted to.

The public kernels are vllm-ascend's own, unpacked by `make public-kernels`; without them the tests
that need them fail and say so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hivm.order import Instruction, Trace
from public_kernels import RELEASE, Batch, is_there, module, one_launch
from public_step import public_step, writes_of

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench import ascend_model
from bench.ascend_model import FITTED, PUBLISHED, ROWS, Costs, Launch, figures, program_ns

COSTS = Costs(launch=1000, start=100, scalar=1, gm_load=50, vector=10, vector_byte=0.5,
              transfer=200, transfer_byte=0.25, barrier=3, flag=2)  # fmt: skip


@pytest.fixture(autouse=True)
def _public_kernels() -> None:
    assert is_there(), f"vllm-ascend {RELEASE} is not unpacked: make public-kernels"


def trace(*actions: Any) -> Trace:
    """Actions as in Trace; ("issue", pipe, bytes) makes an instruction, "miss" a load from GM."""
    made = Trace()
    for kind, *rest in actions:
        if kind != "issue":
            made.actions.append((kind, *rest))
            continue
        number = len(made.instructions)
        pipe, touched, *missed = rest
        made.instructions.append(Instruction(pipe, number, "x"))
        made.touched.append(touched)
        made.missed |= {number} if missed else set()
        made.actions.append(("issue", number))
    return made


def test_pipes_run_beside_each_other() -> None:
    load, vector = ("issue", "MTE2", 80), ("issue", "V", 20)
    assert program_ns(trace(load), COSTS) == 1 + 200 + 10
    assert program_ns(trace(vector, vector), COSTS) == 1 + 20 + 20
    assert program_ns(trace(load, vector), COSTS) == 211, "the vector unit is done before"


def test_a_wait_makes_one_pipe_wait_for_the_other() -> None:
    event = ("MTE2", "V", 0)
    load, vector = ("issue", "MTE2", 80), ("issue", "V", 20)
    ordered = trace(load, ("set", event, 1), ("wait", event, 2), vector)
    assert program_ns(ordered, COSTS) == 211 + 20
    to_scalar = ("V", "S", 0)
    blocked = trace(
        ("issue", "V", 20), ("set", to_scalar, 1), ("wait", to_scalar, 2), ("issue", "V", 20)
    )
    assert program_ns(blocked, COSTS) == 21 + 1 + 20, "nothing is issued while it waits"


def test_barriers_and_scalar_work() -> None:
    assert program_ns(trace(("scalar", 7)), COSTS) == 7
    assert program_ns(trace(("issue", "S", 4, "miss"), ("issue", "S", 4)), COSTS) == 1 + 50 + 1
    barrier = trace(("issue", "V", 20), ("barrier", "V", 1), ("issue", "V", 20))
    assert program_ns(barrier, COSTS) == 21 + 3 + 20
    of_all = trace(("issue", "MTE2", 80), ("barrier", "ALL", 1), ("issue", "V", 20))
    assert program_ns(of_all, COSTS) == 211 + 3 + 1 + 20


def test_a_core_runs_its_programs_one_after_another() -> None:
    launch = Launch([trace(("scalar", 10))] * 5)
    assert launch.microseconds(COSTS, cores=48) == pytest.approx(1.0 + 0.110)
    assert launch.microseconds(COSTS, cores=2) == pytest.approx(1.0 + 3 * 0.110)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: f"{p.source}, {p.what}")
def test_published_times_are_met(published: ascend_model.Published) -> None:
    modelled = Launch(published.run()).microseconds(FITTED)
    assert modelled == pytest.approx(published.microseconds, rel=0.17)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("decode 256", "1028: 1196/884/78/182/650"),
        ("MTP 64 x 4", "260: 322/238/21/49/175"),
        ("prefill 4096", "20: 49/34/3/7/25"),
        ("63 + 2048", "260: 341/269/24/49/198"),
        ("six groups, 1 x 4096", "30: 49/34/3/7/25"),
    ],
)
def test_public_kernels_are_counted_as_written_down(row: str, expected: str) -> None:
    assert figures(ascend_model.theirs(row, "slots"), 40) == expected


def test_best_differs_from_the_release_in_two_edits() -> None:
    batch = Batch([4] * 3, [0, 100, 200], [16, 32])
    as_is, best = one_launch(batch, best=False), one_launch(batch, best=True)
    assert module(best=False) is not module(best=True)
    loops = [sum(count.scalar_ops for count in done.counts) for done in (as_is, best)]
    assert loops[0] > 2 * loops[1], "the release's own text lowers to scalar loops here"


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_public_step_is_three_launches_and_loses_its_scalar_loops(ranks: int) -> None:
    batch = Batch([4, 4, 4, 700], [14, 100, 200, 0], [16, 32])
    as_is, best = (public_step(batch, best=best, ranks=ranks) for best in (False, True))
    assert [len(done.counts) for done in as_is] == [3 if ranks == 1 else 2, 8, 10]
    before, after = (sum(c.scalar_ops for c in launches[-1].counts) for launches in (as_is, best))
    assert before > 2 * after if ranks > 1 else before == after


def test_a_step_that_opens_no_block_writes_nothing() -> None:
    assert writes_of(Batch([2, 2], [100, 64], [32]), 1) == [(0, 1, 2, 3)]
    assert len(public_step(Batch([2], [100], [32]), best=True)) == 2


@pytest.mark.parametrize("form", ["slots", "steady", "writes"])
def test_our_side_of_the_table_is_one_launch(form: str) -> None:
    [done] = ascend_model.ours("twelve groups, 4 decodes", 48, form)
    assert done.traces
    assert 0 < ascend_model.microseconds([done], 48) < 50


def test_rows_are_batches() -> None:
    for row in ROWS.values():
        assert len(row.lengths) == len(row.first)
        assert max(f + n for f, n in zip(row.first, row.lengths, strict=True)) <= 8192
        assert row.sizes
