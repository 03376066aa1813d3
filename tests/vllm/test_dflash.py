"""vLLM's own parallel drafter after vLLM's own runner, once over our tables and once over its own.

It maps no slots through the tables: its kernel reads the gathered rows and writes the queries'
slots into `slot_mappings`. Its constructor, `set_attn`, `propose` and kernels are vLLM's; the
draft model's forward pass, the sampling and the attention backends want a GPU and are replaced.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import speculator as base
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator
from vllm.v1.worker.gpu.spec_decode.xpress.speculator import XPressSpeculator

from fused_slots import PAD_SLOT_ID
from fused_slots.recording.schedule import ScheduleStep
from tests.vllm.drafting import HIDDEN, NUM_DRAFTS, NUM_STEPS, DraftingSchedule, config
from tests.vllm.kv_manager_truth import check_slots
from tests.vllm.test_runner import dispatch

NUM_QUERIES = NUM_DRAFTS + 1


class DraftModel:
    """Keeps where its layers, one in each drafted group, would write the context."""

    def __init__(self, layer_names: list[str]) -> None:
        self.layer_names = layer_names

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return self.layer_names

    def combine_hidden_states(self, hidden_states: Any) -> Any:
        return hidden_states

    def precompute_and_store_context_kv(self, _: Any, positions: Any, slots: Any) -> None:
        self.context = [positions.clone(), *(of_layer.clone() for of_layer in slots)]


class Drafting(dflash.DFlashSpeculator):
    """Keeps the metadata that its attention would be built from, and its layers' slots."""

    def _run_model(self, num_tokens: int, metadata: Any, slots: Any, *_: Any, **__: Any) -> Any:
        self.metadata = metadata
        self.query_slots = [slots[name].clone() for name in self.model.layer_names]
        return torch.zeros(num_tokens, HIDDEN)

    def sample_draft(self, hidden_states: Any, positions: Any, *_: Any, **__: Any) -> Any:
        return (positions * 7 + 3) % 1000


def start(schedule: DraftingSchedule, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two drafters, over our tables and over vLLM's, with layers in two of the groups."""
    names = [group.name for group in schedule.loop.groups]
    drafted = [names.index("full 0"), names.index("sliding 2")]
    attention = SimpleNamespace(
        get_metadata_builder=object, supports_draft_decode_metadata_update=True
    )
    attn_groups = [[attention] if g in drafted else [] for g in range(len(names))]
    monkeypatch.setattr(base, "init_attn_backend", lambda *_, **__: (attn_groups, None, None))
    monkeypatch.setattr(base, "build_attn_metadata", lambda **arguments: arguments)
    monkeypatch.setattr(dflash, "dispatch_cg_and_sync_dp", dispatch)
    drafters: list[Any] = []
    for tables in (schedule.tables, schedule.tables.theirs):
        drafter: Any = Drafting(config(tables.cp_size), torch.device("cpu"))
        groups = schedule.kv_cache_config.kv_cache_groups
        drafter.model = DraftModel([groups[g].layer_names[0] for g in drafted])
        drafter.draft_attn_layer_names = set(drafter.model.layer_names)
        drafter.set_attn(None, schedule.kv_cache_config, tables, None, [])
        drafter.pcp_manager = schedule.pcp_manager
        assert drafter.draft_kv_cache_group_ids == drafted
        assert drafter.dcp_size == tables.cp_size
        drafters.append(drafter)
    # What vLLM reserves for this drafter, so that every draft has a block.
    schedule.loop._scheduler.num_lookahead_tokens = NUM_QUERIES
    return drafters


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize(
    ("pcp", "cp"),
    [
        (False, {}),
        (True, {}),
        (False, {"cp_size": 2, "cp_rank": 1, "cp_interleave": 4}),
    ],
    ids=["alone", "pcp", "dcp"],
)
def test_parallel_drafts_read_and_write_our_tables_as_vllms(
    pcp: bool, cp: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = DraftingSchedule(monkeypatch, pcp, **cp)
    ours, theirs = start(schedule, monkeypatch)
    slots, compared = schedule.tables.slot_mappings, schedule.tables.compared
    others = [g for g in range(len(slots)) if g not in ours.draft_kv_cache_group_ids]
    shorter = checked = left_behind = 0

    def draft(step: ScheduleStep, arguments: dict[str, Any]) -> None:
        nonlocal shorter, checked, left_behind
        batch = arguments["input_batch"]
        shorter += batch.num_tokens < left_behind
        left_behind = batch.num_reqs * NUM_QUERIES
        arguments["aux_hidden_states"] = [torch.zeros(batch.num_tokens, HIDDEN)]
        before = slots[others]
        assert torch.equal(ours.propose(**arguments), theirs.propose(**arguments))
        compare(ours, theirs, batch.idx_mapping)
        assert torch.equal(slots[others], before)
        if not cp:  # the scheduler's blocks are those of one rank
            rejected = arguments["num_rejected"].numpy()
            checked += check_blocks(step, rejected, ours, schedule.loop.groups)

    schedule.run(draft)
    # Steps whose padding alone overwrites what the drafter wrote; under PCP the runner's slots
    # go into the PCP manager's own buffer.
    assert shorter >= 3
    assert checked > 1000 or cp
    assert compared["gather"] == NUM_STEPS
    # Under PCP the runner gathers a rank's rows, and the drafter all of them, unmasked.
    assert compared["gather into out"] == compared["gather of all columns"] // 2 == pcp * NUM_STEPS
    assert compared["compute"] + compared["compute into out"] == NUM_STEPS
    assert schedule.loop.counts["drafts_rejected"] > 10
    assert schedule.loop.counts["chunked_prefills"] > 0
    print(f"\n{shorter} shorter steps, {checked} slots checked: {dict(compared)}")


def compare(ours: Any, theirs: Any, idx_mapping: Any) -> None:
    """What the draft model and its attention got, and the shared buffer as it is left."""
    for mine, their in zip(
        (*ours.model.context, *ours.query_slots),
        (*theirs.model.context, *theirs.query_slots),
        strict=True,
    ):
        assert torch.equal(mine, their)
    drafted = ours.draft_kv_cache_group_ids
    mine, their = ours.block_tables.slot_mappings, theirs.block_tables.slot_mappings
    assert torch.equal(mine[drafted], their[drafted])
    num_slots = len(idx_mapping) * NUM_QUERIES
    assert (mine[drafted, num_slots:] == PAD_SLOT_ID).all()
    mine, their = ours.metadata, theirs.metadata
    ours.block_tables.compare_tables(idx_mapping, mine["block_tables"], their["block_tables"])
    assert torch.equal(mine["slot_mappings"][drafted], their["slot_mappings"][drafted])
    assert torch.equal(mine["seq_lens"], their["seq_lens"])
    if ours.dcp_size > 1:
        assert torch.equal(mine["dcp_local_seq_lens"], their["dcp_local_seq_lens"])


def check_blocks(step: ScheduleStep, rejected: Any, ours: Any, groups: Any) -> int:
    """The context that is kept, and the queries behind it, lie in the manager's blocks."""
    lengths = np.diff(step.query_start_loc)
    kept = lengths - rejected
    first = step.num_computed_tokens[step.idx_mapping]
    is_kept = np.concatenate([np.arange(n) < k for n, k in zip(lengths, kept, strict=True)])
    queries = np.full_like(kept, NUM_QUERIES)
    checked = 0
    for i, g in enumerate(ours.draft_kv_cache_group_ids):
        context = ours.model.context[1 + i].numpy()
        assert (context[~is_kept] == PAD_SLOT_ID).all()
        checked += check_slots(along(step, first, kept), g, groups[g], context[is_kept])
        slots = ours.query_slots[i].numpy()
        checked += check_slots(along(step, first + kept, queries), g, groups[g], slots)
    return checked


def along(step: ScheduleStep, first: Any, lengths: Any) -> ScheduleStep:
    """The step, if its requests had these tokens."""
    return replace(
        step,
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
        positions=np.concatenate(
            [start + np.arange(n) for start, n in zip(first, lengths, strict=True)]
        ),
    )


@pytest.mark.parametrize(
    "derived", [DFlash2Speculator, DSparkSpeculator, XPressSpeculator, LiLiCorrSpeculator]
)
def test_no_drafter_derived_from_it_uses_the_tables_in_another_way(derived: type) -> None:
    for method in ("propose", "set_attn", "capture"):
        assert getattr(derived, method) is getattr(dflash.DFlashSpeculator, method)
    assert "block_tables" in inspect.getsource(dflash)
    assert "block_tables" not in inspect.getsource(sys.modules[derived.__module__])
