"""vLLM's real scheduler and its v1 `InputBatch`, which builds our v1 tables when plugged in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind
from vllm.v1.worker import gpu_input_batch
from vllm.v1.worker.block_table import SlotMappingMode
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from bench.recording.scenarios import Layers, Scenario
from bench.recording.scheduler_loop import SchedulerLoop
from fused_slots.recording.schedule import ScheduleStep
from fused_slots.vllm.v1 import MultiGroupBlockTable
from tests.vllm.kv_manager_truth import SlotOwners, check_slots
from tests.vllm.test_runner import COMMON, SCENARIOS

SEEDS = (21, 22, 23)
LAYERS = (Layers("full", 2), Layers("sliding", 2, window=40), Layers("mamba", 2))


def mode_of(spec: Any) -> SlotMappingMode:
    """The slot mapping mode that the v1 runner passes."""
    is_state = get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA
    return SlotMappingMode.NONE if is_state else SlotMappingMode.TOKEN_TO_KV_SLOT


class Batch:
    """vLLM's persistent batch, changed as the v1 runner changes it."""

    def __init__(self, scenario: Scenario, loop: SchedulerLoop) -> None:
        scheduler: Any = loop._scheduler
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self.batch = InputBatch(
            max_num_reqs=scenario.max_num_reqs,
            max_model_len=scenario.max_model_len,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            device=torch.device("cpu"),
            vocab_size=32000,
            block_sizes=[spec.block_size for spec in specs],
            max_num_blocks_per_req=[
                spec.max_num_blocks_per_req(scheduler.vllm_config, scenario.max_model_len)
                for spec in specs
            ],
            slot_mapping_modes=[mode_of(spec) for spec in specs],
        )

    def update(self, output: Any) -> None:
        """Ended and preempted requests leave, new ones enter, the others grow."""
        batch = self.batch
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            if request_id in batch.req_id_to_index:
                batch.remove_request(request_id)
        for new in output.scheduled_new_reqs:
            batch.add_request(
                CachedRequestState(
                    req_id=new.req_id,
                    prompt_token_ids=list(new.prefill_token_ids),
                    mm_features=[],
                    sampling_params=SamplingParams(),
                    generator=None,
                    block_ids=new.block_ids,
                    num_computed_tokens=new.num_computed_tokens,
                    output_token_ids=[],
                )
            )
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                batch.block_table.append_row(block_ids, batch.req_id_to_index[request_id])
        batch.condense()
        batch.refresh_metadata()

    def swap_two(self, rng: Any) -> None:
        """As an attention backend reorders decodes before prefills."""
        if self.batch.num_reqs > 1:
            self.batch.swap_states(*rng.choice(self.batch.num_reqs, 2, replace=False).tolist())


def in_rows_order(step: ScheduleStep, batch: InputBatch) -> ScheduleStep:
    """The step with its requests in the batch's order; those without tokens get none."""
    place = {str(request): b for b, request in enumerate(step.request_ids)}
    chosen = [place.get(request_id) for request_id in batch.req_ids]
    spans = [
        (0, 0) if b is None else tuple(step.query_start_loc[b : b + 2].tolist()) for b in chosen
    ]
    lengths = [end - begin for begin, end in spans]
    return replace(
        step,
        request_ids=np.array([int(request_id) for request_id in batch.req_ids], np.int32),
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
        positions=np.concatenate([step.positions[a:b] for a, b in spans]),
        expected_blocks=tuple(
            tuple(np.zeros(0, np.int32) if b is None else held[b] for b in chosen)
            for held in step.expected_blocks
        ),
    )


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_slot_is_in_the_block_that_the_kv_cache_manager_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = replace(SCENARIOS[1], seed=seed) if seed == SEEDS[1] else Scenario(
        name="v1", seed=seed, **COMMON | {"layers": LAYERS, "num_blocks": 75}
    )  # fmt: skip
    loop = SchedulerLoop(scenario)
    batch = Batch(scenario, loop)
    tables = batch.batch.block_table
    assert type(tables) is MultiGroupBlockTable
    assert gpu_input_batch.MultiGroupBlockTable is MultiGroupBlockTable
    owners = SlotOwners(loop)
    apply = loop._rows.apply

    def apply_both(output: Any) -> Any:
        owners.forget(output.finished_req_ids | (output.preempted_req_ids or set()))
        batch.update(output)
        return apply(output)

    monkeypatch.setattr(loop._rows, "apply", apply_both)
    rng = np.random.default_rng(seed)
    num_slots = 0
    for recorded in loop.run():
        if rng.random() < 0.3:
            batch.swap_two(rng)
        step = in_rows_order(recorded, batch.batch)
        num_reqs = batch.batch.num_reqs
        tables.commit_block_table(num_reqs)
        tables.compute_slot_mapping(
            num_reqs, torch.from_numpy(step.query_start_loc), torch.from_numpy(step.positions)
        )
        for g, group in enumerate(loop.groups):
            slots = tables[g].slot_mapping.gpu.numpy()
            assert (slots[len(step.positions) :] == -1).all()
            if not group.maps_slots:
                assert (slots == -1).all()
                continue
            num_slots += check_slots(step, g, group, slots)
            owners.write(step, g, group, slots)
        check_rows(step, tables, num_reqs)
    assert loop.counts["steps"] == scenario.num_steps
    assert loop.counts["preemptions"]
    assert owners.num_tokens == num_slots > 1000
    print(f"\nseed {seed}: {num_slots} slots, {loop.counts}")


def check_rows(step: ScheduleStep, tables: Any, num_reqs: int) -> None:
    """Device rows hold the manager's blocks and nothing beyond; rows behind the batch are empty."""
    for g, table in enumerate(tables.block_tables):
        device = table.get_device_tensor(num_reqs).numpy()
        for row, held in enumerate(step.expected_blocks[g]):
            if len(held):
                assert (device[row, : len(held)] == held)[held != 0].all()
                assert not device[row, len(held) :].any()
        assert not table.get_numpy_array()[num_reqs:].any()
