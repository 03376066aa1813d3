"""Groups from a KV cache config without vllm: small specs with the names of vLLM's.

tests/vllm/test_config.py compares the same function with vLLM's own specs and runner.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fused_slots import BlockTableError, KVCacheGroup, SlotMappingMode
from fused_slots.vllm.config import groups_from_kv_cache_config


class Spec:
    """What every spec of vLLM has."""

    block_size = 16
    dcp_sharded = True
    prefix_cacheable = True
    block_table_token_alignment: int | None = 128

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return -(-max_len // self.block_size)


class FullAttentionSpec(Spec):
    pass


class SlidingWindowSpec(Spec):
    num_retained_tokens = 99


class MambaSpec(Spec):
    dcp_sharded = False
    block_table_token_alignment = None

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 3


class CircularBufferSpec(Spec):
    prefix_cacheable = False
    block_table_token_alignment = None

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 1


class KpoolTailSpec(SlidingWindowSpec):
    """A ring of vllm 0.30, which says that its blocks are cacheable and sharded."""


class UniformTypeKVCacheSpecs(Spec):
    def __init__(self, *specs: Spec) -> None:
        self.kv_cache_specs = {f"layer.{i}": spec for i, spec in enumerate(specs)}
        self.first_spec = specs[0]


class PlatformSpec(SlidingWindowSpec):
    """A platform's own spec."""


def groups(*specs: Any, **model: Any) -> tuple[KVCacheGroup, ...]:
    model_config = SimpleNamespace(**{"max_model_len": 1000, "is_encoder_decoder": False} | model)
    return groups_from_kv_cache_config(
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]),
        SimpleNamespace(
            model_config=model_config,
            scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=1200),
        ),
    )


def test_kinds_of_specs() -> None:
    full, window, state, ring, wrapped = groups(
        FullAttentionSpec(),
        PlatformSpec(),
        MambaSpec(),
        CircularBufferSpec(),
        UniformTypeKVCacheSpecs(SlidingWindowSpec(), SlidingWindowSpec()),
    )
    assert [g.row_width for g in (full, window, state, ring, wrapped)] == [64, 64, 3, 1, 64]
    assert [g.sliding_window_reach for g in (full, window, wrapped)] == [0, 99, 99]
    assert state.slot_mapping_mode is SlotMappingMode.NONE
    assert not state.dcp_sharded
    assert ring.circular
    assert not ring.prefix_cacheable
    assert [g.name for g in (window, wrapped)] == ["PlatformSpec", "SlidingWindowSpec"]


def test_cross_attention_needs_rows_for_the_encoders_tokens() -> None:
    long = SimpleNamespace(max_source_positions=1500)
    short = SimpleNamespace()
    for hf_config, width in ((long, 96), (short, 80)):
        (group,) = groups(FullAttentionSpec(), is_encoder_decoder=True, hf_config=hf_config)
        assert group.row_width == width


def test_a_spec_of_an_unknown_kind_is_named() -> None:
    with pytest.raises(BlockTableError, match=r"kv_cache_groups\[1\].*got Spec"):
        groups(FullAttentionSpec(), Spec())


def test_layers_of_two_kinds_in_one_group_are_refused() -> None:
    mixed = UniformTypeKVCacheSpecs(FullAttentionSpec(), CircularBufferSpec())
    with pytest.raises(BlockTableError, match="layers of one kind in a group; got paged and ring"):
        groups(mixed)


def test_a_ring_is_on_every_rank_and_belongs_to_one_request() -> None:
    for spec in (CircularBufferSpec(), KpoolTailSpec()):
        assert spec.dcp_sharded
        (ring,) = groups(spec)
        assert (ring.circular, ring.dcp_sharded, ring.prefix_cacheable) == (True, False, False)
