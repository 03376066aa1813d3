"""From vLLM's `KVCacheConfig` to groups, with the widths that vLLM's v2 runner computes."""

from __future__ import annotations

from typing import Any

from fused_slots.faults import ConfigurationError
from fused_slots.groups import KVCacheGroup, SlotMappingMode, get_block_table_width
from fused_slots.vllm.releases import CONTRACTS
from fused_slots.vllm.releases.vllm import RING, STATE, WRAPPER

SPEC_KINDS = {name: kind for contract in CONTRACTS for name, kind in contract.spec_kinds.items()}
"""What the table of each spec class of the known releases holds."""


def groups_from_kv_cache_config(kv_cache_config: Any, vllm_config: Any) -> tuple[KVCacheGroup, ...]:
    """This package's groups for vLLM's, in their order.

    Sizes, sharding, cacheability, window reach and row width are those of vLLM's v2 runner. The
    slots differ in two kinds: Mamba state gets mode NONE, as in the v1 runner, and a circular
    buffer is mapped as a ring, where vLLM leaves its slots to the attention backend.

    Args:
        kv_cache_config: vllm.v1.kv_cache_interface.KVCacheConfig.
        vllm_config: vllm.config.VllmConfig.

    Raises:
        ConfigurationError: names the group and its spec, where the spec is not a known one or its
            layers disagree.
    """
    max_len = _max_len(vllm_config)
    return tuple(
        _group(g, group.kv_cache_spec, vllm_config, max_len)
        for g, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def _group(g: int, spec: Any, vllm_config: Any, max_len: int) -> KVCacheGroup:
    layer_spec = spec
    if _kind(g, spec) == WRAPPER:
        layer_spec = spec.first_spec
        kinds = {_kind(g, layer) for layer in spec.kv_cache_specs.values()}
        if len(kinds) > 1:
            raise ConfigurationError(
                f"kv_cache_groups[{g}].kv_cache_spec",
                expected="layers of one kind in a group",
                actual=" and ".join(sorted(kinds)),
            )
    kind = _kind(g, layer_spec)
    columns = get_block_table_width(
        spec.max_num_blocks_per_req(vllm_config, max_len),
        spec.block_size,
        token_alignment=spec.block_table_token_alignment,
    )
    return KVCacheGroup(
        block_size=spec.block_size,
        max_num_blocks=1 if kind == RING else columns,
        slot_mapping_mode=(
            SlotMappingMode.NONE if kind == STATE else SlotMappingMode.TOKEN_TO_KV_SLOT
        ),
        circular=kind == RING,
        # A ring is on every rank, and belongs to one request, whatever its spec says.
        dcp_sharded=spec.dcp_sharded and kind != RING,
        prefix_cacheable=spec.prefix_cacheable and kind != RING,
        # Only sliding windows have the attribute.
        sliding_window_reach=0 if kind == RING else getattr(layer_spec, "num_retained_tokens", 0),
        name=type(layer_spec).__name__,
    )


def _kind(g: int, spec: Any) -> str:
    """What a spec's table holds; a subclass that is not listed counts as its nearest base."""
    for base in type(spec).__mro__:
        if base.__name__ in SPEC_KINDS:
            return SPEC_KINDS[base.__name__]
    raise ConfigurationError(
        f"kv_cache_groups[{g}].kv_cache_spec",
        expected=f"one of {', '.join(SPEC_KINDS)}, or a subclass",
        actual=type(spec).__name__,
    )


def _max_len(vllm_config: Any) -> int:
    """The longest sequence that a row must hold; encoder tokens count for cross attention."""
    model_config = vllm_config.model_config
    lengths: list[int] = [model_config.max_model_len]
    if model_config.is_encoder_decoder:
        lengths.append(vllm_config.scheduler_config.max_num_encoder_input_tokens)
        lengths.append(getattr(model_config.hf_config, "max_source_positions", 0))
    return max(lengths)
