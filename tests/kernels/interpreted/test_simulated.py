"""The simulator through interpreted kernels: both plans, watched memory, programs in any order."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest

from tests import checker
from tests.configuration import Config
from tests.guards import check_bands, make_guarded
from tests.kernels.checked_memory import CheckedMemory
from tests.simulator import TARGETS, simulate, simulate_lives

INTERPRETER = TARGETS["interpreter"]
LIFE = 25
"""Steps of one life: short lives see more configurations."""

PARTS = 10
COMMON = {
    "append twice", "arrays longer than the batch", "chunked prefill", "decode", "drafts",
    "dummy run", "gather into out", "malformed step", "preempt", "prefix hit", "replay",
    "shuffle", "slots into out", "speculative", "step", "three calls", "tokens over capacity",
}  # fmt: skip
"""What all parts together must have done."""


@pytest.fixture(scope="module")
def events() -> set[str]:
    """What the parts have done so far."""
    return set()


@pytest.mark.parametrize("part", range(PARTS))
def test_every_step_agrees_with_both_oracles(
    part: int,
    interpreted_steps: int,
    events: set[str],
    memory: CheckedMemory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Parts take turns with plans and tile sizes; a life's digest is the CPU backend's."""
    monkeypatch.setenv("FUSED_SLOTS_PLAN", ("auto", "by_request")[part % 2])
    if part % 4 in (1, 2):
        request.getfixturevalue("small_tiles")
    steps, first_seed = -(-interpreted_steps // PARTS), 100_000 * (part + 1)
    report = simulate_lives(INTERPRETER, first_seed, steps, LIFE, "small")
    assert report.steps >= steps
    assert memory.launches > steps
    if steps >= 100:
        assert report.tokens_owned > steps
        assert min(memory.accesses["load"], memory.accesses["store"]) > 20 * steps
        assert memory.garbage
    # The CPU backend takes its faults apart by the same rules, so its digest is the same.
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "cpu")
    monkeypatch.setenv("FUSED_SLOTS_PLAN", "auto")
    on_cpu = simulate_lives(TARGETS["cpu"], first_seed, steps, LIFE, "small")
    assert on_cpu.digest == report.digest
    events.update(event for event, count in report.events.items() if count)
    if part == PARTS - 1 and interpreted_steps >= 1000:
        assert COMMON <= events


def test_guard_bands_are_neither_read_nor_written(memory: CheckedMemory) -> None:
    """Bands lie round every table of an arena too, so a row's neighbours are out of bounds."""

    def make(config: Config) -> object:
        with mock.patch.dict(os.environ, {"FUSED_SLOTS_BACKEND": "interpreter"}):
            manager = make_guarded(config)
        memory.forbid(band for _, band in manager._backend.bands)
        return manager

    target = replace(INTERPRETER, name="guarded", make=make, after_step=check_bands)
    simulate_lives(target, 77, 50, 10, "small")


def test_what_lies_beyond_a_row_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells past a row's columns may be read; whatever they hold, the results are the same."""
    poisoned = simulate(INTERPRETER, 5, 12, "small").digest
    for poison in (-1, 3):
        monkeypatch.setattr(checker, "POISON", poison)
        assert simulate(INTERPRETER, 5, 12, "small").digest == poisoned
    clean = replace(INTERPRETER, features=INTERPRETER.features - {"poison"})
    assert simulate(clean, 5, 12, "small").digest == poisoned


def test_the_order_of_programs_changes_nothing(memory: CheckedMemory) -> None:
    """One life in Triton's own order and in two others; the parts above shuffle every launch."""
    digests = set()
    for seed in (None, 2, 3):
        memory.shuffle(seed)
        digests.add(simulate(INTERPRETER, 9, 10, "small").digest)
    assert len(digests) == 1
