"""A live engine's tables, recorded as the plugin builds them, and its metrics in vLLM's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import prometheus_client.multiprocess
import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner

from bench.recording.scheduler_loop import SchedulerLoop
from fused_slots.recording.call_check import CallCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import Schedule, load_schedule
from tests.vllm.kv_manager_truth import SlotOwners
from tests.vllm.test_input_batch import Batch, in_rows_order
from tests.vllm.test_runner import SCENARIOS, Runner, _follow, dispatch

STEPS, KEPT = 70, 16


def check(schedule: Schedule, slots: torch.Tensor) -> None:
    assert schedule.metadata["calls_before"] > 0
    assert schedule.metadata["rows_not_recorded"] == 0
    assert {"rows", "slots"} == schedule.metadata["state"].keys()
    replay = Replay(schedule)
    assert sum(len(step.mismatches) for step in replay) == 0
    assert torch.equal(replay.tables.slot_mappings, slots)
    assert not list(CallCheck(schedule))


@pytest.mark.usefixtures("plugged_in")
def test_a_run_of_the_v2_runner_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatch)
    monkeypatch.setenv("FUSED_SLOTS_RECORD", str(KEPT))
    scenario = replace(SCENARIOS[0], num_steps=STEPS)
    loop = SchedulerLoop(scenario)
    runner = Runner(scenario, loop)
    tables = runner.runner.block_tables
    _follow(loop, runner, SlotOwners(loop), monkeypatch)
    for step in loop.run():
        runner.latest = step
        runner.execute()
    schedule = load_schedule(tables.save_recording(tmp_path / "v2.npz.xz"))
    steps = list(schedule)
    assert KEPT <= len(steps) - 1 < 2 * KEPT
    assert all(step.call.gathers and step.call.maps for step in steps[1:]), "one call a step"
    check(schedule, tables.slot_mappings)
    last = steps[-1]
    assert last.positions[: last.query_start_loc[-1]].tolist() == step.positions.tolist()
    for g, held in enumerate(step.expected_blocks):
        for recorded, truth in zip(last.expected_blocks[g], held, strict=False):
            assert (recorded == truth)[truth != 0].all()


@pytest.mark.usefixtures("plugged_in")
def test_a_run_of_the_v1_batch_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSED_SLOTS_RECORD", str(KEPT))
    scenario = replace(SCENARIOS[0], num_steps=STEPS)
    loop = SchedulerLoop(scenario)
    batch = Batch(scenario, loop)
    tables = batch.batch.block_table
    apply = loop._rows.apply

    def apply_both(output: object) -> object:
        batch.update(output)
        return apply(output)

    monkeypatch.setattr(loop._rows, "apply", apply_both)
    rng = np.random.default_rng(1)
    for recorded in loop.run():
        if rng.random() < 0.3:
            batch.swap_two(rng)
        step = in_rows_order(recorded, batch.batch)
        num_reqs = batch.batch.num_reqs
        tables.commit_block_table(num_reqs)
        starts = torch.from_numpy(step.query_start_loc)
        tables.compute_slot_mapping(num_reqs, starts, torch.from_numpy(step.positions))
    path = tables.manager.save_recording(tmp_path / "v1.npz.xz")
    check(load_schedule(path), tables.manager.slot_mappings)


METRICS = """
from tests.test_observe import build, one_step
tables = build()
for _ in range(3):
    one_step(tables)
"""


def test_metrics_of_two_ranks_in_the_folder_that_processes_share(tmp_path: Path) -> None:
    for rank in range(2):
        environment = {
            "FUSED_SLOTS_METRICS": "1",
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
            "RANK": str(rank),
        }
        subprocess.run(
            [sys.executable, "-c", METRICS],
            env={**os.environ, **environment},
            cwd=Path(__file__).parents[2],
            check=True,
        )
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    found = {
        (sample.name, sample.labels["rank"], sample.labels.get("code", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    for rank in "01":
        assert found["fused_slots_launches_total", rank, ""] == 3, "as of its end"
        assert found["fused_slots_faults_total", rank, "empty_ring"] == 3
        assert found["fused_slots_rows", rank, ""] == 0
