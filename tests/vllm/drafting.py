"""vLLM's own scheduler and runner over twin tables, stopped in every step where vLLM drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.config import AttentionConfig, ParallelConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.pcp_manager import PCPManager
from vllm.v1.worker.gpu.spec_decode import speculator as base

from bench.recording.scheduler_loop import SchedulerLoop
from fused_slots.recording.schedule import ScheduleStep
from tests.vllm.kv_manager_truth import SlotOwners
from tests.vllm.test_runner import SCENARIOS, Runner, _follow, dispatch
from tests.vllm.twin import TwinTables

NUM_DRAFTS, HIDDEN, NUM_STEPS = 3, 4, 25
SCENARIO = replace(SCENARIOS[2], num_steps=NUM_STEPS, draft_tokens=NUM_DRAFTS)
Draft = Callable[[ScheduleStep, dict[str, Any]], None]


def config(dcp_size: int = 1) -> Any:
    """What a speculator's constructor reads."""
    speculative = MagicMock(
        num_speculative_tokens=NUM_DRAFTS,
        method="mtp",
        draft_sample_method="greedy",
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
    )
    speculative.draft_model_config.get_hidden_size.return_value = HIDDEN
    speculative.draft_model_config.use_mla = dcp_size > 1  # only such a drafter is sharded
    speculative.draft_model_config.hf_config = SimpleNamespace(
        mask_token_id=9, is_causal=True, num_hidden_layers=2
    )
    return SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(
            max_num_seqs=SCENARIO.max_num_reqs,
            max_num_batched_tokens=SCENARIO.max_num_batched_tokens,
        ),
        model_config=SimpleNamespace(
            dtype=torch.float32, use_fp64_gumbel=False, max_model_len=SCENARIO.max_model_len
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=dcp_size, decode_context_parallel_size=dcp_size
        ),
        attention_config=AttentionConfig(),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
    )


class DraftingSchedule:
    """Steps of a real schedule, with the arguments that the runner gives to a speculator.

    Args:
        pcp: the runner is rank 0 of 2 in prefill context parallelism.
        tables: keyword arguments put over those of the runner's tables.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pcp: bool, **tables: Any) -> None:
        monkeypatch.setattr(base, "_target_feeds_hc_residual", lambda _: False)
        monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
        monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatch)
        monkeypatch.setattr(
            model_runner, "BlockTables", lambda **arguments: TwinTables(**arguments | tables)
        )
        self.loop = SchedulerLoop(SCENARIO)
        self._runner = Runner(SCENARIO, self.loop)
        self.tables: Any = self._runner.runner.block_tables
        self.kv_cache_config = self.loop._scheduler.kv_cache_config
        self.pcp_manager = make_pcp_manager(self.tables) if pcp else None
        self._runner.runner.pcp_manager = self.pcp_manager
        _follow(self.loop, self._runner, SlotOwners(self.loop), monkeypatch)
        self._monkeypatch = monkeypatch

    def run(self, draft: Draft) -> None:
        """Call `draft` after every step: vLLM drafts when the runner's counters have moved on."""
        runner, execute = self._runner, self.loop._execute
        batch: Any = None

        def execute_and_draft(output: Any, order: list[str]) -> Any:
            seq_lens = batch.seq_lens.clone() if order else None
            result = execute(output, order)
            if order:
                draft(runner.latest, self._arguments(batch, seq_lens, output, result))
            return result

        self._monkeypatch.setattr(self.loop, "_execute", execute_and_draft)
        for step in self.loop.run():
            runner.latest = step
            batch, _ = runner.execute()
            if self.pcp_manager is not None:
                batch = self.pcp_manager.global_batch

    def _arguments(self, batch: Any, seq_lens: Any, output: Any, result: Any) -> dict[str, Any]:
        """Those of the call of `propose` in the runner's `sample_tokens`."""
        states = self._runner.runner.req_states
        counts = [1 + len(output.scheduled_spec_decode_tokens.get(r, ())) for r in result.req_ids]
        sampled = torch.tensor([max(len(tokens), 1) for tokens in result.sampled_token_ids])
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            sampled.int(),
            seq_lens,
            torch.tensor([0, *counts]).cumsum(0).int(),
            batch.idx_mapping,
            states.prefill_len.gpu,
        )
        prefill = self.pcp_manager._local_batch if self.pcp_manager else batch
        return {
            "input_batch": batch,
            "attn_metadata": {},
            "slot_mappings": {},
            "last_hidden_states": torch.zeros(prefill.num_tokens_after_padding, HIDDEN),
            "aux_hidden_states": None,
            "num_sampled": num_sampled,
            "num_rejected": num_rejected,
            "last_sampled": states.last_sampled_tokens,
            "next_prefill_tokens": states.next_prefill_tokens,
            "temperature": torch.zeros(SCENARIO.max_num_reqs),
            "seeds": torch.zeros(SCENARIO.max_num_reqs, dtype=torch.int64),
        }


def make_pcp_manager(tables: TwinTables) -> PCPManager:
    """Rank 0 of 2; the other rank's hidden states do not come."""
    manager = PCPManager(
        2,
        0,
        torch.device("cpu"),
        False,
        max_num_reqs=SCENARIO.max_num_reqs,
        max_num_tokens=SCENARIO.max_num_batched_tokens,
        block_tables=tables,
    )
    manager.restore_hidden_states = lambda _: torch.zeros(SCENARIO.max_num_batched_tokens, HIDDEN)
    return manager
