"""vLLM's form of the groups, one list per property, turned into `KVCacheGroup`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fused_slots.faults import ConfigurationError, require_bool
from fused_slots.groups import KVCacheGroup, SlotMappingMode
from fused_slots.layout import as_tuple, per_group

_DEFAULTS = {
    "slot_mapping_enabled": True,
    "dcp_sharded": None,
    "sliding_window_reach": 0,
    "kernel_block_sizes": None,
    "slot_mapping_modes": SlotMappingMode.TOKEN_TO_KV_SLOT,
    "circular": False,
    "prefix_cacheable": None,
    "pools": "",
}


def groups_from_lists(
    block_sizes: Sequence[int],
    max_num_blocks_per_group: Sequence[int],
    **given: Sequence[Any] | None,
) -> list[KVCacheGroup]:
    """One group per entry of `block_sizes`; None stands for the default in every group.

    Args:
        block_sizes, ...: as the constructor of `AscendBlockTables` takes them, all of them.

    Raises:
        ConfigurationError: a list has another length than `block_sizes`, or a value is refused.
    """
    block_sizes = as_tuple("block_sizes", block_sizes)
    count = len(block_sizes)
    columns: dict[str, Sequence[Any]] = {"max_num_blocks_per_group": max_num_blocks_per_group}
    for name, default in _DEFAULTS.items():
        values = given[name]
        columns[name] = [default] * count if values is None else values
    lists = [per_group(name, values, count) for name, values in columns.items()]
    groups = []
    for g, (size, *rest) in enumerate(zip(block_sizes, *lists, strict=True)):
        max_num_blocks, enabled, sharded, reach, kernel_size, mode, ring, cacheable, pool = rest
        try:
            is_enabled = require_bool("slot_mapping_enabled", enabled)
            group = KVCacheGroup(
                block_size=size,
                max_num_blocks=max_num_blocks,
                kernel_block_size=kernel_size,
                slot_mapping_mode=mode if is_enabled else SlotMappingMode.NONE,
                circular=ring,
                dcp_sharded=sharded,
                prefix_cacheable=cacheable,
                sliding_window_reach=reach,
                pool=pool,
            )
        except ConfigurationError as error:
            raise error.within(f"groups[{g}]") from None
        groups.append(group)
    return groups
