"""vLLM's real scheduler and real v2 model runner, with our tables plugged in.

The runner's constructor is replaced because it wants a GPU; `execute_model` is its own, up to the
point where the model would run. Every slot and every gathered row is compared with the blocks that
the KV cache manager holds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBuffers

from bench.recording.scenarios import Layers, Scenario
from bench.recording.scheduler_loop import SchedulerLoop
from fused_slots import PAD_SLOT_ID
from fused_slots.recording.schedule import ScheduleStep
from fused_slots.vllm.config import groups_from_kv_cache_config
from fused_slots.vllm.v2 import FusedBlockTables
from tests.vllm.kv_manager_truth import SlotOwners, check_slots
from tests.vllm.test_recorder import advance, make_runner

HYBRID = (Layers("full", 2), Layers("sliding", 2, window=40), Layers("mamba", 2))
COMMON: dict[str, Any] = {
    "description": "",
    "num_steps": 110,
    "layers": HYBRID,
    "block_size": 8,
    "num_blocks": 130,
    "max_num_reqs": 6,
    "max_num_batched_tokens": 64,
    "prompt_tokens": (5, 120),
    "output_tokens": (10, 60),
    "arrivals_per_step": 0.5,
    "max_model_len": 256,
}
SCENARIOS = (
    Scenario(name="sync", seed=11, **COMMON | {"num_blocks": 90}),
    Scenario(
        name="async, prefix caching",
        seed=12,
        prefix_caching=True,
        shared_prefixes=(48, 80),
        asynchronous=True,
        **COMMON | {"num_blocks": 95},
    ),
    Scenario(
        name="async, drafts",
        seed=13,
        asynchronous=True,
        draft_tokens=2,
        **COMMON | {"layers": (*HYBRID, Layers("ring", 1, ring_size=4))},
    ),
)
MUST_HAPPEN = {
    "sync": ("preemptions", "chunked_prefills", "requests_finished"),
    "async, prefix caching": ("preemptions", "prefix_hits", "chunked_prefills"),
    "async, drafts": ("preemptions", "drafts_rejected", "drafts_accepted"),
}


class ModelWouldRun(Exception):
    """Ends `execute_model` where the model would run, with what was prepared for it."""


class Runner:
    """vLLM's v2 runner beside the scheduler loop, its tables built as it builds them."""

    def __init__(self, scenario: Scenario, loop: SchedulerLoop) -> None:
        self.runner = runner = make_runner(scenario, [])
        self.loop = loop
        self.output: Any = None
        device = torch.device("cpu")
        runner.device = device
        runner.max_num_reqs = scenario.max_num_reqs
        runner.input_buffers = InputBuffers(
            scenario.max_num_reqs, scenario.max_num_batched_tokens, device
        )
        runner.observability_config = SimpleNamespace(cudagraph_metrics=False)
        runner.model_config = SimpleNamespace(rswa_window=None)
        runner.parallel_config = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
        runner.kv_connector, runner.ec_connector = MagicMock(), MagicMock()
        for absent in ("aux_output_connector", "lora_config", "ubatch_runner", "fast_prefill"):
            setattr(runner, absent, None)
        runner.cudagraph_manager = None
        runner.is_encoder_decoder = False
        runner.model_state.num_new_sampled_tokens_per_step = 1
        runner.model_state.preprocess_state = self._stop
        runner.block_tables = build_tables(loop._scheduler, scenario)

    @staticmethod
    def _stop(input_batch: Any, block_tables: Any, *_: Any) -> None:
        raise ModelWouldRun(input_batch, block_tables)

    def execute(self) -> tuple[Any, Any]:
        """The batch and its gathered tables."""
        with pytest.raises(ModelWouldRun) as stopped:
            self.runner.execute_model(self.output)
        return stopped.value.args


def build_tables(scheduler: Any, scenario: Scenario) -> Any:
    """The call that vLLM's runner makes, with its own class name."""
    groups = groups_from_kv_cache_config(scheduler.kv_cache_config, scheduler.vllm_config)
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    return model_runner.BlockTables(
        block_sizes=[spec.block_size for spec in specs],
        max_num_reqs=scenario.max_num_reqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        max_num_blocks_per_group=[group.row_width for group in groups],
        device=torch.device("cpu"),
        slot_mapping_enabled=[spec.uses_slot_mapping for spec in specs],
        dcp_sharded=[spec.dcp_sharded for spec in specs],
        sliding_window_reach=[group.sliding_window_reach for group in groups],
        cp_size=1,
        cp_rank=0,
        cp_interleave=1,
    )


def dispatch(
    manager: Any, num_reqs: int, num_tokens: int, *_: Any, **__: Any
) -> tuple[BatchExecutionDescriptor, None]:
    """No graph, but the padding of one: requests and tokens beyond the batch."""
    return (
        BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens + num_tokens % 2, num_reqs),
        None,
    )


def check_tables(step: ScheduleStep, tables: Any, groups: Any) -> int:
    """Gathered rows hold the manager's blocks, zero beyond them and below the sliding window."""
    compared = 0
    for g, group in enumerate(groups):
        for b, held in enumerate(step.expected_blocks[g]):
            row = tables[g][b].numpy()
            first = max(
                step.num_computed_tokens[step.idx_mapping[b]] - group.sliding_window_reach, 0
            )
            first = first // group.block_size if group.sliding_window_reach else 0
            assert not row[:first].any()
            assert not row[len(held) :].any()
            here = held[first:]
            assert (row[first : len(held)] == here)[here != 0].all()
            compared += len(here)
    return compared


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_slot_and_row_is_what_the_kv_cache_manager_holds(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatch)
    loop = SchedulerLoop(scenario)
    runner = Runner(scenario, loop)
    tables = runner.runner.block_tables
    assert type(tables) is FusedBlockTables
    owners = SlotOwners(loop)
    _follow(loop, runner, owners, monkeypatch)
    num_slots = num_cells = 0
    for step in loop.run():
        runner.latest = step
        before = tables.launches
        batch, gathered = runner.execute()
        assert tables.launches == before + 1
        assert batch.idx_mapping.tolist() == step.idx_mapping.tolist()
        assert batch.positions[: batch.num_tokens].tolist() == step.positions.tolist()
        slots = tables.slot_mappings.numpy()
        assert (slots[:, batch.num_tokens :] == PAD_SLOT_ID).all()
        for g, group in enumerate(loop.groups):
            if group.circular:
                assert (slots[g] == PAD_SLOT_ID).all()
                continue
            num_slots += check_slots(step, g, group, slots[g])
            if group.maps_slots:
                owners.write(step, g, group, slots[g])
        num_cells += check_tables(step, gathered, loop.groups)
    assert loop.counts["steps"] == scenario.num_steps
    assert all(loop.counts[name] for name in MUST_HAPPEN[scenario.name]), loop.counts
    assert owners.num_tokens > 1000
    assert num_slots > 1000
    assert num_cells > 1000
    assert tables.check_integrity() is None
    print(f"\n{scenario.name}: {num_slots} slots, {num_cells} cells, {loop.counts}")


def _follow(
    loop: SchedulerLoop, runner: Runner, owners: SlotOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the runner see every scheduler output, those without tokens too."""
    apply, execute = loop._rows.apply, loop._execute

    def apply_both(output: Any) -> Any:
        runner.output = output
        owners.forget(output.finished_req_ids | (output.preempted_req_ids or set()))
        appends = apply(output)
        if not output.total_num_scheduled_tokens:
            runner.runner.execute_model(output)
            assert not runner.runner.block_tables._rows.pending
        return appends

    def execute_both(output: Any, order: list[str]) -> Any:
        result = execute(output, order)
        if order:
            advance(runner.runner, output, result, runner.latest)
        return result

    monkeypatch.setattr(loop._rows, "apply", apply_both)
    monkeypatch.setattr(loop, "_execute", execute_both)


@pytest.mark.usefixtures("plugged_in")
def test_an_output_without_tokens_returns_early_with_its_writes_applied() -> None:
    scenario = SCENARIOS[0]
    loop = SchedulerLoop(scenario)
    runner = Runner(scenario, loop)
    step = next(iter(loop.run()))
    assert step.appends
    output = MagicMock(
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        total_num_scheduled_tokens=0,
        encoder_input_updates={},
        free_encoder_mm_hashes=[],
    )
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["x"], num_computed_tokens=[0], new_block_ids=[([5], [6], [7])]
    )
    output.new_block_ids_to_zero = output.kv_cache_block_copies = None
    runner.runner.req_states.req_id_to_index["x"] = 2
    tables = runner.runner.block_tables
    assert runner.runner.execute_model(output) is not None
    assert tables.num_blocks.gpu[:, 2].tolist() == [1, 1, 1]
    assert [int(table.gpu[2, 0]) for table in tables.block_tables] == [5, 6, 7]
