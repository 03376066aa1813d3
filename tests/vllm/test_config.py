"""Groups from vLLM's KV cache config: every spec is known, and widths are the v2 runner's."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1 import kv_cache_interface as interface

from fused_slots import AscendBlockTables, BlockTableError, KVCacheGroup, SlotMappingMode
from fused_slots.vllm.config import groups_from_kv_cache_config
from fused_slots.vllm.releases import find_contract, installed_versions

NONE, PAGED = SlotMappingMode.NONE, SlotMappingMode.TOKEN_TO_KV_SLOT
SPEC_KINDS = find_contract(installed_versions()).spec_kinds
ABSTRACT = {"KVCacheSpec", "AttentionSpec"}
ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}


def spec_classes() -> set[str]:
    return {
        name
        for name, value in vars(interface).items()
        if inspect.isclass(value) and issubclass(value, interface.KVCacheSpec)
    }


def test_every_spec_class_of_vllm_is_named() -> None:
    assert spec_classes() - ABSTRACT == set(SPEC_KINDS)


def uniform(*specs: Any) -> Any:
    named = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    return interface.UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=named)


def make_spec(name: str) -> Any:
    """A small spec of that class."""
    spec_class = getattr(interface, name)
    if name == "UniformTypeKVCacheSpecs":
        return uniform(interface.FullAttentionSpec(block_size=24, **ATTENTION))
    if name == "MambaSpec":
        return spec_class(block_size=512, shapes=((4,),), dtypes=(torch.float32,))
    if name == "HiSparseHotSpec":
        return spec_class(block_size=16, page_size=64, blocks_per_request=5)
    if name == "HiSparseResidentSpec":
        return spec_class(block_size=16, page_size=64)
    extra: dict[str, Any] = {}
    if "SlidingWindow" in name:
        extra["sliding_window"] = 100
    if name == "RSWASpec":
        extra["rswa_window"] = 40
    if name == "ChunkedLocalAttentionSpec":
        extra["attention_chunk_size"] = 64
    return spec_class(block_size=24, **ATTENTION | extra)


def vllm_config(**changes: Any) -> Any:
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    model = {"max_model_len": 1000, "is_encoder_decoder": False}
    model |= {k: v for k, v in changes.items() if k in ("is_encoder_decoder", "hf_config")}
    parallel |= {k: v for k, v in changes.items() if k in parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(mamba_cache_mode=changes.get("mamba_cache_mode", "none")),
        scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=1200),
    )


def kv_cache_config(*specs: Any) -> Any:
    groups = [interface.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return interface.KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups)


class TablesWouldBeBuilt(Exception):
    """Ends `initialize_kv_cache` at the tables, with the keywords that it passes."""


def keywords_of_the_runner(config: Any, settings: Any) -> dict[str, Any]:
    """What vLLM's real v2 runner passes to its tables for this config."""
    runner = object.__new__(model_runner.GPUModelRunner)
    runner.parallel_config = settings.parallel_config
    runner.parallel_config.cp_kv_cache_interleave_size = 1
    runner.vllm_config, runner.model_config = settings, settings.model_config
    runner.scheduler_config = settings.scheduler_config
    runner.is_encoder_decoder = settings.model_config.is_encoder_decoder
    runner.max_model_len = settings.model_config.max_model_len
    runner.speculator, runner.device = None, torch.device("cpu")
    runner.jit_warmup_registry = MagicMock()
    runner.model_state = MagicMock()
    runner.model_state.get_additional_cg_support.return_value = ()
    runner.max_num_reqs, runner.max_num_tokens = 4, 64
    runner.dcp_size = settings.parallel_config.decode_context_parallel_size
    runner.dcp_rank = 0
    runner.req_states, runner.input_buffers = MagicMock(), MagicMock()
    runner.vocab_size, runner.batch_sharder = 100, None

    def build(**keywords: Any) -> None:
        raise TablesWouldBeBuilt(keywords)

    with (
        patch.object(model_runner, "BlockTables", build),
        patch.object(model_runner, "init_attn_backend", lambda *a, **k: ([], MagicMock(), [])),
        patch.object(model_runner, "maybe_create_adaptive_verification_manager", MagicMock()),
        patch.object(model_runner, "get_max_chunk_logits", MagicMock()),
        pytest.raises(TablesWouldBeBuilt) as stopped,
    ):
        runner.initialize_kv_cache(config)
    keywords: dict[str, Any] = stopped.value.args[0]
    return keywords


SETTINGS = {
    "plain": {},
    "decode context parallel": {"decode_context_parallel_size": 2},
    "encoder and decoder": {
        "is_encoder_decoder": True,
        "hf_config": SimpleNamespace(max_source_positions=1500),
    },
    "mamba states at block boundaries": {"mamba_cache_mode": "align"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sizes_are_those_that_the_v2_runner_passes(name: str) -> None:
    settings = vllm_config(**SETTINGS[name])
    config = kv_cache_config(*map(make_spec, SPEC_KINDS))
    groups = groups_from_kv_cache_config(config, settings)
    passed = keywords_of_the_runner(config, settings)
    assert [group.block_size for group in groups] == passed["block_sizes"]
    assert [group.row_width for group in groups] == passed["max_num_blocks_per_group"]
    for group, sharded in zip(groups, passed["dcp_sharded"], strict=True):
        assert group.dcp_sharded == (sharded and not group.circular)
    assert [group.sliding_window_reach for group in groups] == passed["sliding_window_reach"]
    for group, enabled in zip(groups, passed["slot_mapping_enabled"], strict=True):
        if group.name != "MambaSpec":  # mapped by the v2 runner, but nobody reads the slots
            assert enabled == (group.maps_slots and not group.circular)


def one_group(spec: Any, **changes: Any) -> KVCacheGroup:
    (group,) = groups_from_kv_cache_config(kv_cache_config(spec), vllm_config(**changes))
    return group


@pytest.mark.parametrize("name", SPEC_KINDS)
def test_mode_ring_and_cacheability(name: str) -> None:
    spec = make_spec(name)
    group = one_group(spec)
    state = name in ("MambaSpec", "HiSparseHotSpec")
    assert group.slot_mapping_mode is (NONE if state else PAGED)
    assert group.circular is (name == "CircularBufferSpec")
    assert group.prefix_cacheable is spec.prefix_cacheable
    # vLLM's ring says that it is sharded, but each rank holds it.
    assert group.dcp_sharded is (spec.dcp_sharded and not group.circular)
    assert group.name == ("FullAttentionSpec" if name.startswith("Uniform") else name)


def test_a_sliding_window_keeps_what_multi_module_drafts_read_again() -> None:
    spec = interface.SlidingWindowSpec(
        block_size=16, sliding_window=100, extra_retained_tokens=3, **ATTENTION
    )
    assert one_group(spec).sliding_window_reach == 102
    assert one_group(uniform(spec, spec)).sliding_window_reach == 102


def test_groups_build_a_manager() -> None:
    specs = [make_spec(name) for name in ("FullAttentionSpec", "MambaSpec", "CircularBufferSpec")]
    groups = groups_from_kv_cache_config(kv_cache_config(*specs), vllm_config())
    tables = AscendBlockTables.from_groups(groups, max_num_reqs=2, max_num_batched_tokens=8)
    assert [table.gpu.shape[1] for table in tables.block_tables] == [48, 1, 1]


class UnknownSpec(interface.KVCacheSpec):
    """A spec of some later release."""


class NewAttentionSpec(interface.FullAttentionSpec):
    """A subclass, as other platforms have them."""


def test_an_unknown_spec_is_named() -> None:
    with pytest.raises(BlockTableError, match=r"kv_cache_groups\[0\].*got UnknownSpec"):
        one_group(UnknownSpec(block_size=16))


def test_a_subclass_counts_as_its_base() -> None:
    group = one_group(NewAttentionSpec(block_size=24, **ATTENTION))
    assert (group.slot_mapping_mode, group.name) == (PAGED, "NewAttentionSpec")


class AlignedSpec(interface.FullAttentionSpec):
    """A spec whose backend reads block tables in longer pieces."""

    @property
    def block_table_token_alignment(self) -> int:
        return 1024


def test_a_specs_own_alignment_counts() -> None:
    spec = AlignedSpec(block_size=16, **ATTENTION)
    assert one_group(spec).row_width == 64
    assert one_group(interface.FullAttentionSpec(block_size=16, **ATTENTION)).row_width == 64
    assert one_group(AlignedSpec(block_size=128, **ATTENTION)).row_width == 8
    assert one_group(AlignedSpec(block_size=256, **ATTENTION)).row_width == 4
    assert one_group(AlignedSpec(block_size=384, **ATTENTION)).row_width == 8


def test_layers_of_two_kinds_in_one_group_are_refused() -> None:
    mixed = uniform(make_spec("FullAttentionSpec"), make_spec("CircularBufferSpec"))
    with pytest.raises(BlockTableError, match="layers of one kind in a group; got paged and ring"):
        one_group(mixed)
