"""The recorder against vLLM 0.33.0 itself: run in an environment that has it.

    python -m pytest tests/vllm/test_recorder.py

The recorder's plain rules for rows, appends and batch order are compared with the real v2 model
runner, whose constructor is replaced because it wants a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected, post_update
from vllm.v1.worker.gpu.model_runner import GPUModelRunner, sort_batch_req_ids
from vllm.v1.worker.gpu.states import RequestState

from bench.recording.recorder import find_scenario, record
from bench.recording.scenarios import SCENARIOS, RecordingError, Scenario
from bench.recording.scheduler_loop import SchedulerLoop, batch_order
from fused_slots.recording.schedule import Append, load_recording

NUM_STEPS = 120  # with the real runner, whose kernels run in Triton's interpreter
BY_NAME = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


@BY_NAME
def test_recording_again_gives_the_bytes_that_ship(scenario: Scenario, tmp_path: Path) -> None:
    record(scenario, tmp_path / "again")
    shipped = resources.files("fused_slots.recording") / "shipped" / f"{scenario.name}.npz.xz"
    assert (tmp_path / "again").read_bytes() == shipped.read_bytes()


def test_another_seed_gives_another_recording(tmp_path: Path) -> None:
    scenario = find_scenario("preemption")
    other = record(replace(scenario, seed=scenario.seed + 100), tmp_path / "other")
    counts = load_recording("preemption").metadata["counts"]
    assert other.metadata["counts"] != counts


def test_a_scenario_whose_event_does_not_happen_is_not_written(tmp_path: Path) -> None:
    roomy = replace(find_scenario("preemption"), num_blocks=9000, num_steps=50)
    with pytest.raises(RecordingError, match="some preemptions, resumptions"):
        record(roomy, tmp_path / "never_written")
    assert not (tmp_path / "never_written").exists()


def test_traffic_that_runs_dry_is_an_error_and_no_hang(tmp_path: Path) -> None:
    quiet = replace(find_scenario("preemption"), arrivals_per_step=0.0, output_tokens=(2, 3))
    with pytest.raises(RecordingError, match=r"400 steps of traffic; got \d+, then 101 schedules"):
        record(quiet, tmp_path / "never_written")


def test_batch_order_is_that_of_the_real_runner_for_any_mix_of_requests() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = [str(request) for request in random.permutation(12)]
        output = SimpleNamespace(
            num_scheduled_tokens={request: int(random.integers(1, 7)) for request in ids},
            scheduled_spec_decode_tokens={
                request: [0] * int(random.integers(0, 4)) for request in ids[::2]
            },
        )
        expected = sort_batch_req_ids(
            output.num_scheduled_tokens, output.scheduled_spec_decode_tokens, 4
        )
        assert batch_order(output, decode_query_len=4) == expected


def make_runner(scenario: Scenario, appends: list[Append]) -> Any:
    """vLLM's runner with its own request states, and tables that note what it appends."""
    runner = object.__new__(GPUModelRunner)
    runner.req_states = RequestState(
        max_num_reqs=scenario.max_num_reqs,
        max_model_len=scenario.max_model_len,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        num_speculative_steps=scenario.draft_tokens,
        vocab_size=100,
        device=torch.device("cpu"),
    )
    runner.block_tables = SimpleNamespace(
        append_block_ids=lambda row, ids, overwrite: appends.append(Append(row, ids, overwrite))
    )
    for stub in ("model_state", "lora_state", "sampler", "prompt_logprobs_worker"):
        setattr(runner, stub, MagicMock())
    runner.kv_block_zeroer = MagicMock()
    runner.kv_caches, runner.kv_cache_config = [], MagicMock()
    for absent in ("pooling_runner", "pp_handler", "encoder_cache", "pcp_manager"):
        setattr(runner, absent, None)
    runner.adaptive_verification = None
    runner.is_last_pp_rank = True
    runner.use_pp = False
    runner.decode_query_len = 1 + scenario.draft_tokens
    return runner


def advance(runner: Any, output: Any, result: Any, step: Any) -> None:
    """Move the runner's device counters on with vLLM's own kernels, as after sampling."""
    states = runner.req_states
    rows = torch.from_numpy(step.idx_mapping).long()
    query_start_loc = torch.from_numpy(step.query_start_loc)
    seq_lens = states.num_computed_tokens.gpu[rows] + query_start_loc.diff()
    num_logits = [
        1 + len(output.scheduled_spec_decode_tokens.get(req_id, ())) for req_id in result.req_ids
    ]
    # The sampler also samples for a chunk that does not end its prompt; the kernel discards it.
    sampled = torch.tensor([max(len(tokens), 1) for tokens in result.sampled_token_ids])
    num_sampled, num_rejected = get_num_sampled_and_rejected(
        sampled.int(),
        seq_lens,
        torch.tensor([0, *num_logits]).cumsum(0).int(),
        rows,
        states.prefill_len.gpu,
    )
    assert num_sampled.tolist() == [len(tokens) for tokens in result.sampled_token_ids]
    post_update(
        rows,
        states.num_computed_tokens.gpu,
        states.last_sampled_tokens,
        None,
        torch.zeros(len(rows), 1 + runner.decode_query_len, dtype=torch.int64),
        num_sampled,
        num_rejected,
        query_start_loc,
        states.all_token_ids.gpu,
        states.total_len.gpu,
    )


@BY_NAME
def test_rows_appends_order_and_positions_are_those_of_the_real_runner(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies of cached Mamba states move data, not table entries.
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.model_runner.copy_kv_cache_blocks_inplace", lambda *_: None
    )
    loop = SchedulerLoop(replace(scenario, num_steps=NUM_STEPS))
    appended: list[Append] = []
    runner = make_runner(scenario, appended)
    apply, execute = loop._rows.apply, loop._execute
    latest: dict[str, Any] = {}

    def apply_both(output: Any) -> tuple[Append, ...]:
        appends = apply(output)
        appended.clear()
        runner.finish_requests(output)
        runner.add_requests(output)
        runner.update_requests(output)
        assert appended == list(appends)
        rows = {request_id: row.index for request_id, row in loop._rows.live.items()}
        assert runner.req_states.req_id_to_index == rows
        latest["output"] = output
        return appends

    def execute_both(output: Any, order: list[str]) -> Any:
        result = execute(output, order)
        if order:
            advance(runner, output, result, latest["step"])
        return result

    monkeypatch.setattr(loop._rows, "apply", apply_both)
    monkeypatch.setattr(loop, "_execute", execute_both)
    num_steps = 0
    for step in loop.run():
        latest["step"] = step
        batch, _ = runner.gather_batch_req_state(latest["output"], dummy_run=False)
        assert [str(request) for request in step.request_ids] == batch.req_ids
        assert step.idx_mapping.tolist() == batch.idx_mapping_np.tolist()
        assert step.query_start_loc[1:].tolist() == batch.num_scheduled_tokens.cumsum().tolist()
        rows = step.idx_mapping
        on_device = runner.req_states.num_computed_tokens.gpu.numpy()
        assert step.num_computed_tokens[rows].tolist() == on_device[rows].tolist()
        num_steps += 1
    assert num_steps == NUM_STEPS
    assert all(loop.counts[count] for count in scenario.must_happen)
