"""vLLM's own speculators after vLLM's own runner, over our tables and its own at once.

Their constructors, `propose` and kernels are vLLM's. Only the draft model's forward pass, the
sampling of its logits and the attention backends' metadata are replaced, because these want a GPU.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as multi_module
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as target_dependent

from fused_slots.recording.schedule import ScheduleStep
from tests.vllm.drafting import HIDDEN, NUM_DRAFTS, NUM_STEPS, DraftingSchedule, config
from tests.vllm.test_runner import dispatch
from tests.vllm.twin import TwinTables


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
    for module in (target_dependent, multi_module):
        monkeypatch.setattr(module, "dispatch_cg_and_sync_dp", dispatch)
    schedule = DraftingSchedule(monkeypatch, pcp)
    speculator = make(speculator_class, schedule.tables, schedule.kv_cache_config, in_place)
    speculator.pcp_manager = schedule.pcp_manager

    def draft(step: ScheduleStep, arguments: dict[str, Any]) -> None:
        drafts = speculator.propose(**arguments)
        assert drafts.shape == (len(step.idx_mapping), NUM_DRAFTS)

    schedule.run(draft)
    compared = schedule.tables.compared
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
