"""vLLM's own speculators after vLLM's own runner, over our tables and its own at once.

Their constructors, `propose` and kernels are vLLM's. Only the draft model's forward pass, the
sampling of its logits and the attention backends' metadata are replaced, because these want a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.pcp_manager import PCPManager
from vllm.v1.worker.gpu.spec_decode import speculator as base
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as multi_module
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as target_dependent

from fused_slots.vllm.scheduler_loop import SchedulerLoop
from tests.vllm.kv_manager_truth import SlotOwners
from tests.vllm.test_runner import SCENARIOS, Runner, _follow, dispatch
from tests.vllm.twin import TwinTables

NUM_DRAFTS, HIDDEN, NUM_STEPS = 3, 4, 25
SCENARIO = replace(SCENARIOS[2], num_steps=NUM_STEPS, draft_tokens=NUM_DRAFTS)


def config() -> Any:
    """What a speculator's constructor reads."""
    speculative = MagicMock(
        num_speculative_tokens=NUM_DRAFTS,
        method="mtp",
        draft_sample_method="greedy",
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
    )
    speculative.draft_model_config.get_hidden_size.return_value = HIDDEN
    parallel = SimpleNamespace(
        data_parallel_size=1, data_parallel_rank=0, decode_context_parallel_size=1
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
        parallel_config=parallel,
    )


def make(speculator_class: type, tables: TwinTables, kv_cache_config: Any, in_place: bool) -> Any:
    """The speculator with everything of vLLM's that comes before and after the draft model."""

    class Drafting(speculator_class):
        def sample_draft(self, hidden_states: Any, positions: Any, *_: Any, **__: Any) -> Any:
            return (positions * 7 + 3) % 1000

        def _build_attn_metadata(self, *_: Any, **__: Any) -> Any:
            return {}

        def _run_model(self, tokens: Any, *_: Any, **__: Any) -> Any:
            if speculator_class is StandaloneARSpeculator:
                return torch.zeros(tokens.shape[0], HIDDEN)
            return (torch.zeros(tokens, HIDDEN),) * 2

    speculator = Drafting(config(), torch.device("cpu"))
    speculator.model = MagicMock()
    speculator.block_tables = tables
    speculator.kv_cache_config = kv_cache_config
    speculator.attn_groups = []
    speculator.supports_decode_metadata_update = in_place
    if speculator_class is StandaloneARSpeculator:
        speculator.expanded_slot_mappings = torch.empty(  # as its set_attn does
            tables.num_kv_cache_groups, speculator.max_num_tokens + speculator.max_num_reqs
        ).long()
    return speculator


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize(
    ("speculator_class", "in_place", "pcp", "computes"),
    [
        (EagleSpeculator, False, False, NUM_DRAFTS - 1),
        (EagleSpeculator, False, True, NUM_DRAFTS - 1),
        (EagleSpeculator, True, False, NUM_DRAFTS),
        (StandaloneARSpeculator, False, False, NUM_DRAFTS),
        (MultiModuleMTPSpeculator, False, False, 1),
    ],
)
def test_drafts_get_vllms_slots(
    speculator_class: type,
    in_place: bool,
    pcp: bool,
    computes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "_target_feeds_hc_residual", lambda _: False)
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    for module in (model_runner, target_dependent, multi_module):
        monkeypatch.setattr(module, "dispatch_cg_and_sync_dp", dispatch)
    monkeypatch.setattr(model_runner, "BlockTables", TwinTables)
    loop = SchedulerLoop(SCENARIO)
    runner = Runner(SCENARIO, loop)
    tables: Any = runner.runner.block_tables
    _follow(loop, runner, SlotOwners(loop), monkeypatch)
    speculator = make(speculator_class, tables, loop._scheduler.kv_cache_config, in_place)
    if pcp:
        speculator.pcp_manager = runner.runner.pcp_manager = make_pcp_manager(tables)
    batch: Any = None
    execute = loop._execute

    def execute_and_propose(output: Any, order: list[str]) -> Any:
        """vLLM drafts after it has sampled: before the runner's counters move on."""
        states = runner.runner.req_states
        seq_lens = batch.seq_lens.clone() if order else None
        result = execute(output, order)
        if order:
            propose(speculator, batch, seq_lens, output, result, states)
        return result

    monkeypatch.setattr(loop, "_execute", execute_and_propose)
    for step in loop.run():
        runner.latest = step
        batch, _ = runner.execute()
        if pcp:
            batch = speculator.pcp_manager.global_batch
    compared = tables.compared
    assert compared["compute"] + compared["compute into out"] == NUM_STEPS * (1 + computes)
    assert compared["gather"] == NUM_STEPS
    # Under PCP the runner gathers a rank's rows, and the speculator all of them, unmasked.
    assert compared["gather into out"] == compared["gather of all columns"] // 2 == pcp * NUM_STEPS
    if speculator_class is StandaloneARSpeculator or pcp:
        assert compared["compute into out"] == NUM_STEPS
    if speculator_class is MultiModuleMTPSpeculator:
        assert compared["longer arrays"] >= NUM_STEPS
    assert compared["slots"] > 1000
    print(f"\n{speculator_class.__name__}: {dict(compared)}")


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


def propose(
    speculator: Any, batch: Any, seq_lens: Any, output: Any, result: Any, states: Any
) -> None:
    """The call of the runner's `sample_tokens`."""
    counts = [1 + len(output.scheduled_spec_decode_tokens.get(r, ())) for r in result.req_ids]
    sampled = torch.tensor([max(len(tokens), 1) for tokens in result.sampled_token_ids])
    num_sampled, num_rejected = get_num_sampled_and_rejected(
        sampled.int(),
        seq_lens,
        torch.tensor([0, *counts]).cumsum(0).int(),
        batch.idx_mapping,
        states.prefill_len.gpu,
    )
    prefill = speculator.pcp_manager._local_batch if speculator.pcp_manager else batch
    num_hidden = prefill.num_tokens_after_padding
    drafts = speculator.propose(
        batch,
        {},
        {},
        torch.zeros(1, HIDDEN).expand(num_hidden, HIDDEN),
        None,
        num_sampled,
        num_rejected,
        states.last_sampled_tokens,
        states.next_prefill_tokens,
        torch.zeros(SCENARIO.max_num_reqs),
        torch.zeros(SCENARIO.max_num_reqs, dtype=torch.int64),
    )
    assert drafts.shape == (batch.num_reqs, NUM_DRAFTS)
