"""vLLM's own PCP manager in its own runner, over our tables and its own at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from bench.recording.scheduler_loop import SchedulerLoop
from fused_slots import PAD_SLOT_ID
from tests.vllm.kv_manager_truth import SlotOwners, check_slots
from tests.vllm.test_runner import HYBRID, SCENARIOS, Runner, _follow, dispatch
from tests.vllm.twin import TwinTables

SCENARIO = replace(SCENARIOS[0], num_steps=50, layers=HYBRID[:2])


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize(("rank", "shards_decodes"), [(0, False), (1, True)])
def test_a_ranks_tables_and_the_gathered_slots_are_vllms(
    rank: int, shards_decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "copy_kv_cache_blocks_inplace", lambda *_: None)
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatch)
    monkeypatch.setattr(model_runner, "BlockTables", TwinTables)
    loop = SchedulerLoop(SCENARIO)
    runner = Runner(SCENARIO, loop)
    tables: Any = runner.runner.block_tables
    assert type(tables) is TwinTables
    manager = PCPManager(
        2,
        rank,
        torch.device("cpu"),
        shards_decodes,
        max_num_reqs=SCENARIO.max_num_reqs,
        max_num_tokens=SCENARIO.max_num_batched_tokens,
        block_tables=tables,
    )
    runner.runner.pcp_manager = manager
    mapped: list[torch.Tensor] = []
    prepare_attn = manager.prepare_attn

    def kept(batch: Any) -> Any:
        gathered, slots = prepare_attn(batch)
        mapped.append(slots.clone())
        return gathered, slots

    monkeypatch.setattr(manager, "prepare_attn", kept)
    _follow(loop, runner, SlotOwners(loop), monkeypatch)
    chunks = 0
    for step in loop.run():
        runner.latest = step
        launches = tables.launches
        local, gathered = runner.execute()
        assert tables.launches - launches == 2
        chunks += len(set(local.idx_mapping.tolist())) < local.num_reqs
        assert len(gathered[0]) == local.num_reqs_after_padding
        num_tokens = int(step.query_start_loc[-1])
        for g, group in enumerate(loop.groups):
            of_all = manager._global_batch_slot_mappings[g]
            check_slots(step, g, group, of_all.numpy())
            written = mapped[-1][g][mapped[-1][g] != PAD_SLOT_ID]
            # Of both ranks' tokens, each one is written once.
            assert written.sort().values.equal(of_all[:num_tokens].sort().values)
    assert chunks >= 5  # requests that are two rows of the rank's batch
    assert tables.compared["gather into out"] == tables.compared["compute into out"] == 50
    assert tables.compared["cells"] > 1000
    assert tables.compared["slots"] > 1000
    assert not tables.compared["tokens without a block"]
