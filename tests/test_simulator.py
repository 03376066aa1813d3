"""The simulator on the CPU, and proof that it notices what it is there to notice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fused_slots import KVCacheGroup, block_tables
from fused_slots.backends.base import Step
from fused_slots.backends.cpu import CpuBackend
from tests.configuration import Config, Target, make_manager, random_config
from tests.engine import Engine
from tests.guards import check_bands, make_guarded
from tests.host_halves import HALVES, staged_by
from tests.model import POISON, Mismatch
from tests.simulator import (
    TARGETS,
    Report,
    SimulationError,
    Simulator,
    main,
    simulate,
    simulate_lives,
)

PARTS = 20
EVENTS = {
    "admit", "append refused: capacity", "append refused: groups", "append refused: negative",
    "append refused: row", "append refused: too large", "append twice",
    "arrays longer than the batch", "chunked prefill", "decode", "drafts", "dummy in the batch",
    "dummy run", "empty request", "explained", "finish", "gather into out", "int32 out refused",
    "integrity checked", "malformed step", "overwrite then append",
    "overwrite with nothing, then append", "overwritten before it was applied", "preempt",
    "preempt for blocks", "prefix hit", "read before staged writes are applied",
    "redirected append", "rejected drafts", "replay", "replay lengths", "resume", "row cleared",
    "row cut", "row written from a block on", "rows checked", "shuffle",
    "skipped request", "slots into out", "speculative", "step", "three calls",
    "tokens over capacity", "whole prefill",
}  # fmt: skip
"""Everything the simulator can do; a part of the run that misses one has lost its subject."""

RARE = {"int32 out refused"}
"""What one part in twenty may miss."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_step_agrees_with_both_oracles(part: int, simulated_steps: int) -> None:
    steps = -(-simulated_steps // PARTS)
    with staged_by(HALVES[part % len(HALVES)]):
        report = simulate_lives(TARGETS["cpu"], 10_000 * (part + 1), steps)
    assert report.steps >= steps
    assert report.tokens_owned > steps
    if steps >= 1000:
        assert set(report.events) <= EVENTS
        assert EVENTS - set(report.events) <= RARE


def test_guard_bands_round_every_buffer_keep_their_bytes(simulated_steps: int) -> None:
    simulate_lives(TARGETS["cpu-guarded"], 1, simulated_steps // 20)


def test_small_lives_stay_small() -> None:
    for seed in range(200):
        config = random_config(Random(seed), "small", TARGETS["cpu"])
        assert len(config.groups) <= 4
        assert config.max_num_reqs <= 6
        assert config.capacity <= 40


def test_configurations_cover_every_kind_of_group() -> None:
    groups, parallel = [], []
    for seed in range(400):
        config = random_config(Random(seed), "normal", TARGETS["cpu"])
        groups += config.groups
        parallel.append(config.context_parallel)
    assert {len(random_config(Random(s), "normal", TARGETS["cpu"]).groups) for s in range(400)} == (
        set(range(1, 17))
    )
    assert {cp.size for cp in parallel} >= {1, 2, 3, 4, 5, 7, 8}
    assert any(group.circular for group in groups)
    assert any(not group.maps_slots for group in groups)
    assert any(group.columns_per_block > 1 for group in groups)
    assert any(group.sliding_window_reach for group in groups)
    assert any(group.tokens_per_column % 2 for group in groups)
    assert any(not group.dcp_sharded for group in groups)


def test_one_seed_has_one_digest() -> None:
    first = simulate_lives(TARGETS["cpu"], 7, 120)
    assert simulate_lives(TARGETS["cpu"], 7, 120).digest == first.digest
    assert simulate_lives(TARGETS["cpu-guarded"], 7, 120).digest == first.digest
    assert simulate_lives(TARGETS["cpu"], 8, 120).digest != first.digest


def test_command_line_prints_digest_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7", "--steps", "40", "--lives", "3"]) == 0
    printed = capsys.readouterr().out
    assert simulate_lives(TARGETS["cpu"], 7, 120).digest in printed
    assert "120 steps, 0 mismatches" in printed


def broken(change: str) -> Target:
    """A target whose CPU backend does one thing wrong."""

    class Broken(CpuBackend):
        def map_slots(self, step: Step) -> None:
            super().map_slots(step)
            out = self._slots if step.slots_out is None else step.slots_out.numpy()
            if change == "one slot":
                out[out > 100] += 1
            if change == "tail":
                out[:, -1] = -7

        def take_faults(self) -> list[Any]:
            faults = super().take_faults()
            return faults[:-1] if change == "faults" else faults

        def gather(self, step: Step) -> None:
            super().gather(step)
            if change == "gather" and step.tables_out is None:
                self._input_tables[0][-1, -1] = 5
            if change == "band":
                self.arena[-1] = 5

    def make(config: Config) -> Any:
        with mock.patch.object(block_tables, "backend_class", return_value=Broken):
            if change == "band":
                return make_guarded(config)
            return make_manager(config)

    after_step = check_bands if change == "band" else None
    return Target("broken", make, after_step=after_step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("one slot", "slots"),
        ("tail", "slots"),
        ("faults", "faults"),
        ("gather", "input_block_tables"),
        ("band", "guard band"),
    ],
)
def test_a_defect_is_found_and_its_command_printed(change: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message) as caught:
        simulate_lives(broken(change), 0, 800)
    command = str(caught.value).splitlines()[-1]
    assert command.startswith("reproduce: python -m tests.simulator --seed ")
    seed, steps = int(command.split()[5]), int(command.split()[7])
    with pytest.raises(SimulationError, match=message):
        simulate(broken(change), seed, steps)


def test_a_failure_on_the_command_line_exits_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TARGETS, "cpu", replace(broken("tail"), name="cpu"))
    assert main(["--seed", "3"]) == 1
    assert "--backend cpu" in capsys.readouterr().err


def test_slot_owners_find_two_tokens_on_one_slot() -> None:
    config = replace(
        random_config(Random(1), "small", TARGETS["cpu"]),
        groups=(KVCacheGroup(4, 4),),
        first_ids=(1,),
        pool_sizes=(8,),
    )
    engine = Engine(config, Random(1))
    engine.pools.references[0] = {1: 1, 2: 2}
    engine.owners.write(0, 4, uid=1, position=0, pools=engine.pools)
    engine.owners.write(0, 4, uid=1, position=0, pools=engine.pools)
    for uid, position in ((2, 0), (1, 1)):
        with pytest.raises(Mismatch, match="slot 4 is token 0 of request 1"):
            engine.owners.write(0, 4, uid, position, engine.pools)
    with pytest.raises(Mismatch, match="block 2, which has 2 owners"):
        engine.owners.write(0, 8, 3, 0, engine.pools)
    engine.owners.release(1)
    engine.owners.write(0, 4, uid=2, position=3, pools=engine.pools)


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator", "--seed", "2", "--steps", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 steps, 0 mismatches" in done.stdout


def test_poison_beyond_a_row_never_comes_out() -> None:
    """What lies in columns past a row's length is read by nobody, whatever its value."""
    simulator = Simulator(TARGETS["cpu"], 5)
    assert any((np.asarray(t.gpu) == POISON).any() for t in tables_of(simulator))
    digest = run_steps(simulator, 30).digest
    clean = replace(TARGETS["cpu"], features=TARGETS["cpu"].features - {"poison"})
    assert run_steps(Simulator(clean, 5), 30).digest == digest


def tables_of(simulator: Simulator) -> list[Any]:
    tables: list[Any] = simulator.check.manager.block_tables
    return tables


def run_steps(simulator: Simulator, steps: int) -> Report:
    for _ in range(steps):
        simulator.step()
    assert not any(
        torch.eq(table, POISON).any() for table in simulator.check.manager.input_block_tables
    )
    return simulator.report(steps)
