"""vLLM's form of the groups, one list per property, turned into `KVCacheGroup`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fused_slots.faults import ConfigurationError, require_bool
from fused_slots.groups import KVCacheGroup, SlotMappingMode
from fused_slots.layout import as_tuple, per_group

_FIELDS = {
    "slot_mapping_enabled": "enabled",
    "dcp_sharded": "dcp_sharded",
    "sliding_window_reach": "sliding_window_reach",
    "kernel_block_sizes": "kernel_block_size",
    "slot_mapping_modes": "slot_mapping_mode",
    "circular": "circular",
    "prefix_cacheable": "prefix_cacheable",
    "pools": "pool",
}
"""The field of a group that each list is for; `enabled` decides the mode."""


def groups_from_lists(
    block_sizes: Sequence[int],
    max_num_blocks_per_group: Sequence[int],
    **lists: Sequence[Any] | None,
) -> list[KVCacheGroup]:
    """One group per entry of `block_sizes`; None stands for the default in every group.

    Args:
        block_sizes, ...: as the constructor of `AscendBlockTables` takes them, all of them.

    Raises:
        ConfigurationError: a list has another length than `block_sizes`, or a value is refused.
    """
    sizes = as_tuple("block_sizes", block_sizes)
    blocks = per_group("max_num_blocks_per_group", max_num_blocks_per_group, len(sizes))
    given: dict[str, tuple[Any, ...]] = {"block_size": sizes, "max_num_blocks": blocks}
    for name, field in _FIELDS.items():
        if (values := lists[name]) is not None:
            given[field] = per_group(name, values, len(sizes))
    groups = []
    for g, values in enumerate(zip(*given.values(), strict=True)):
        fields = dict(zip(given, values, strict=True))
        try:
            if not require_bool("slot_mapping_enabled", fields.pop("enabled", True)):
                fields["slot_mapping_mode"] = SlotMappingMode.NONE
            groups.append(KVCacheGroup(**fields))
        except ConfigurationError as error:
            raise error.within(f"groups[{g}]") from None
    return groups
