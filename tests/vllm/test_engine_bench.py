"""The engine benchmark's instruments on vLLM's own runner: they see each step, and let go of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1.core.sched.scheduler import Scheduler

from bench import vllm_engine_count
from bench.vllm_engine_worker import Watch, counting
from fused_slots.recording.scenarios import Scenario
from fused_slots.recording.scheduler_loop import SchedulerLoop
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
