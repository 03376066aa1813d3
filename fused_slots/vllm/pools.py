"""The size of the KV cache reaches the tables: they then refuse ids that are in no pool.

The engine builds tables before it knows how many blocks there are, profiles with a few, and may
plan anew; its runner's `kv_cache_config` is then another object, or says another number.
"""

from __future__ import annotations

from typing import Any

from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import BlockTableError
from fused_slots.logs import logger


def follow_pools(manager: AscendBlockTables, kv_cache_config: Any) -> None:
    """Give tables the pool sizes of a runner's KV cache config, if they are new.

    What does not fit (fewer groups than the config has, a pool beyond the slot dtype) leaves the
    pools unknown: the engine, not this check, decides what it may do.

    Args:
        manager: between two steps; while writes are staged, the next call does it.
        kv_cache_config: vllm.v1.kv_cache_interface.KVCacheConfig, or None.
    """
    sizes = _sizes(kv_cache_config)
    followed = getattr(manager, "_pools_followed", None)
    if followed == (id(kv_cache_config), sizes) or manager._rows.pending:
        return
    manager._pools_followed = id(kv_cache_config), sizes  # type: ignore[attr-defined]
    known = sizes if len(sizes) == manager.num_kv_cache_groups else None
    try:
        manager.resize_pools(known)
    except BlockTableError as error:
        logger.warning("fused_slots does not check block ids against the pool: %s", error)
        manager.resize_pools(None)


def _sizes(kv_cache_config: Any) -> list[int | None]:
    """Blocks of each group's pool; host groups of HiSparse have one of their own."""
    if kv_cache_config is None:
        return []
    host = getattr(kv_cache_config, "hisparse_host_num_blocks", None)
    return [
        host if getattr(group, "host_resident", False) else kv_cache_config.num_blocks
        for group in kv_cache_config.kv_cache_groups
        if type(group.kv_cache_spec).__name__ != "EncoderOnlyAttentionSpec"
    ]
