"""The engine benchmark's instruments on vLLM's own runner: they see each step, and let go of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1.core.sched.scheduler import Scheduler

from bench import vllm_engine_count, vllm_engine_twin
from bench.recording.scenarios import Scenario
from bench.recording.scheduler_loop import SchedulerLoop
from bench.vllm_engine_twin_report import read_twins
from bench.vllm_engine_watch import Watch, counting
from fused_slots.vllm.deferral import DeferringBlockTables
from tests.vllm.kv_manager_truth import SlotOwners
from tests.vllm.test_runner import SCENARIOS, Runner, _follow, dispatch

SMALL = replace(SCENARIOS[0], num_steps=16, max_num_reqs=3, prompt_tokens=(4, 9))
FEW_BLOCKS = SCENARIOS[0]  # requests are preempted


def make_runner(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> tuple[Runner, SchedulerLoop]:
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatch)
    loop = SchedulerLoop(scenario)
    runner = Runner(scenario, loop)
    _follow(loop, runner, SlotOwners(loop), monkeypatch)
    return runner, loop


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, SchedulerLoop]:
    """A runner whose tables are what `model_runner.BlockTables` is when it is built."""
    return make_runner(SMALL, monkeypatch)


def run(runner: Runner, loop: SchedulerLoop) -> None:
    for step in loop.run():
        runner.latest = step
        runner.execute()


@pytest.mark.parametrize("ours", [True, False])
def test_the_preparation_is_timed_with_either_tables(
    ours: bool, request: pytest.FixtureRequest
) -> None:
    if ours:
        request.getfixturevalue("plugged_in")
    runner, loop = request.getfixturevalue("small")
    assert isinstance(runner.runner.block_tables, DeferringBlockTables) is ours
    watch = Watch(runner.runner, batch=3, on_device=False)
    run(runner, loop)
    watch.remove()
    numbers = watch.numbers()
    assert 5 < numbers["steps"] < SMALL.num_steps  # the first ones have prompts
    assert numbers["preparation_us"] > numbers["block_tables_us"] > numbers["prepare_attn_us"] > 0
    wrapped = {*Watch.PARTS, "execute_model"}
    assert not wrapped & (vars(runner.runner).keys() | vars(runner.runner.block_tables).keys())


def test_launches_of_each_step_and_preemptions_are_printed(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vllm_engine_count, "EVERY", 1)
    monkeypatch.setattr(DeferringBlockTables, "defer_writes", DeferringBlockTables.defer_writes)
    preempted = []
    preempt = Scheduler._preempt_request

    def noted(self: Scheduler, request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", noted)
    vllm_engine_count.register()
    vllm_engine_count.register()
    request.getfixturevalue("plugged_in")
    runner, loop = make_runner(FEW_BLOCKS, monkeypatch)
    with counting(runner.runner) as steps:
        run(runner, loop)
    assert steps.total() == FEW_BLOCKS.num_steps
    lines = capsys.readouterr().out.splitlines()
    assert preempted
    assert lines[-1].startswith(
        f"fused_slots launches: {{1: {FEW_BLOCKS.num_steps}}} preemptions: {len(preempted)} process"
    )


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("broken", ["nothing", "a slot", "a row"])
def test_the_twin_of_an_engine_finds_what_differs_and_nothing_else(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TWIN", str(tmp_path))
    monkeypatch.setenv("ENGINE_TWIN_RUN", "run_twin")
    monkeypatch.setattr(model_runner, "BlockTables", model_runner.BlockTables)
    vllm_engine_twin.register()
    vllm_engine_twin.register()
    runner, loop = make_runner(SMALL, monkeypatch)
    tables = runner.runner.block_tables
    assert tables.is_twin
    if broken == "a slot":
        judge = tables._judge.compute_slot_mappings
        monkeypatch.setattr(
            tables._judge, "compute_slot_mappings", lambda *a, **k: judge(*a, **k)[0, :1].add_(1)
        )
    if broken == "a row":
        gather = tables._judge.gather_block_tables
        monkeypatch.setattr(
            tables._judge,
            "gather_block_tables",
            lambda *a, **k: tuple(table + 1 for table in gather(*a, **k)),
        )
    run(runner, loop)
    idx_mapping = torch.tensor([0], dtype=torch.int32)
    out = tuple(torch.zeros_like(table) for table in tables.input_block_tables)
    tables.gather_block_tables(idx_mapping, 1, out, torch.zeros(len(out), dtype=torch.uint64))
    tables.compute_slot_mappings(
        *(idx_mapping, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]), 1),
        out=torch.zeros(tables.num_kv_cache_groups, 3, dtype=torch.int64),
    )
    tables.findings.save()
    found = read_twins(tmp_path, "run")
    assert found["processes"] == 1
    assert found["slot calls"] == SMALL.num_steps + 1
    assert (found["gathers into out"], found["slots into out"]) == (1, 1)
    assert found["rows"] > SMALL.num_steps
    assert bool(found.get("slots that differ")) is (broken == "a slot")
    assert bool(found.get("rows that differ")) is (broken == "a row")
    assert bool(found["first"]) is (broken != "nothing")
