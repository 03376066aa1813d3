"""Where tables lie in the arena, and the largest block id that each group accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.faults import ConfigurationError
from fused_slots.layout import ARENA_ALIGNMENT, TableLayout, as_tuple, per_group

INT32_MAX = 2**31 - 1
PAGED = KVCacheGroup(16, 8, name="full")
SPLIT = KVCacheGroup(64, 4, kernel_block_size=32)
STATE = KVCacheGroup(16, 3, slot_mapping_mode=SlotMappingMode.NONE)


def layout(*groups: KVCacheGroup, **settings: Any) -> TableLayout:
    return TableLayout(
        **{
            "groups": groups,
            "widths": tuple(group.row_width for group in groups),
            "max_num_reqs": 5,
            "max_num_batched_tokens": 10,
            "context_parallel": ContextParallel(),
            "replay_window": 0,
            "slot_dtype": torch.int64,
            "num_blocks": (None,) * len(groups),
            **settings,
        }
    )


def test_tables_lie_one_behind_the_other_on_boundaries() -> None:
    tables = layout(PAGED, STATE, SPLIT)
    assert tables.widths == (8, 3, 8)
    assert tables.offsets == (0, 64, 128, 192)
    assert tables.arena_size == 192
    assert all(offset % ARENA_ALIGNMENT == 0 for offset in tables.offsets)
    sizes = [tables.max_num_reqs * width for width in tables.widths]
    for begin, end, size in zip(tables.offsets, tables.offsets[1:], sizes, strict=False):
        assert begin + size <= end


def test_no_groups_need_no_memory() -> None:
    tables = layout()
    assert (tables.num_groups, tables.arena_size, tables.num_bytes) == (0, 0, 0)
    assert tables.max_block_ids == ()


@pytest.mark.parametrize(("groups", "most"), [(1, 357_913_941), (4, 143_165_576)])
def test_more_rows_than_one_packet_can_name_are_refused(groups: int, most: int) -> None:
    assert layout(*[STATE] * groups, max_num_reqs=most).max_num_reqs == most
    with pytest.raises(ConfigurationError, match=f"max_num_reqs: expected at most {most} with"):
        layout(*[STATE] * groups, max_num_reqs=most + 1)


def test_bytes_of_the_buffers() -> None:
    tables = layout(PAGED, STATE)
    assert tables.num_bytes == 2 * 4 * 128 + 4 * 2 * 5 + 2 * 2 * 10 * 8
    assert layout(PAGED, slot_dtype=torch.int32).num_bytes == 2 * 4 * 64 + 4 * 5 + 2 * 10 * 4


def test_replicated_groups_are_one_shard() -> None:
    replicated = KVCacheGroup(16, 8, dcp_sharded=False)
    tables = layout(PAGED, replicated, context_parallel=ContextParallel(4, 3))
    assert (tables.shards(0), tables.shards(1)) == ((4, 3), (1, 0))


def test_groups_are_described_by_number_and_name() -> None:
    tables = layout(PAGED, SPLIT)
    assert (tables.describe(0), tables.describe(1)) == ("group 0 (full)", "group 1")


@pytest.mark.parametrize(
    ("group", "settings", "largest", "why"),
    [
        (PAGED, {}, INT32_MAX, "int32 block table"),
        (SPLIT, {}, 2**30 - 1, "int32 block table"),
        (KVCacheGroup(30, 4, kernel_block_size=10), {}, (INT32_MAX - 2) // 3, "block table"),
        (PAGED, {"num_blocks": (100,)}, 99, "num_blocks=100"),
        (PAGED, {"slot_dtype": torch.int32}, 2**27 - 1, "slot_dtype int32"),
        (KVCacheGroup(48, 4), {"slot_dtype": torch.int32}, 2**31 // 48 - 1, "slot_dtype"),
        (STATE, {"slot_dtype": torch.int32}, INT32_MAX, "int32 block table"),
        (PAGED, {"slot_dtype": torch.int32, "num_blocks": (7,)}, 6, "num_blocks=7"),
        (KVCacheGroup(INT32_MAX, 4), {"slot_dtype": torch.int32}, 0, "slot_dtype"),
    ],
)
def test_largest_block_id(
    group: KVCacheGroup, settings: dict[str, Any], largest: int, why: str
) -> None:
    tables = layout(group, **settings)
    assert tables.max_block_ids == (largest,)
    assert why in tables.block_id_limit(0)
    last_column = (largest + 1) * group.columns_per_block - 1
    assert last_column <= INT32_MAX
    if group.maps_slots and tables.slot_dtype is torch.int32:
        assert (largest + 1) * group.block_size - 1 <= INT32_MAX


def test_interleave_must_divide_the_blocks_of_sharded_groups_only() -> None:
    replicated = KVCacheGroup(20, 8, dcp_sharded=False)
    layout(PAGED, replicated, context_parallel=ContextParallel(2, 0, 16))
    layout(KVCacheGroup(20, 8), context_parallel=ContextParallel(1, 0, 16))
    with pytest.raises(ConfigurationError, match=r"group 1.*block_size \(20\).*got 16"):
        layout(PAGED, KVCacheGroup(20, 8), context_parallel=ContextParallel(2, 0, 16))


def test_interleave_divides_the_allocation_block_and_not_the_kernel_block() -> None:
    layout(SPLIT, context_parallel=ContextParallel(2, 0, 64))
    with pytest.raises(ConfigurationError, match="got 128"):
        layout(SPLIT, context_parallel=ContextParallel(2, 0, 128))


@pytest.mark.parametrize("field", ["max_num_reqs", "max_num_batched_tokens"])
def test_sizes_are_positive(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}.*got 0"):
        layout(PAGED, **{field: 0})


def test_per_group_lists() -> None:
    assert per_group("widths", [1, 2], 2) == (1, 2)
    assert as_tuple("widths", iter([1])) == (1,)
    with pytest.raises(ConfigurationError, match=r"widths: expected 3 entries.*got 2"):
        per_group("widths", [1, 2], 3)
    with pytest.raises(ConfigurationError, match="widths: expected a list; got 'ab'"):
        per_group("widths", "ab", 2)


def test_a_null_block_is_a_plain_int_within_every_table() -> None:
    last = (INT32_MAX - 1) // 2  # whose two columns fit int32
    held = layout(PAGED, SPLIT, null_block_id=np.int64(last)).null_block_id
    assert (held, type(held)) == (last, int)
    with pytest.raises(ConfigurationError, match="null_block_id in group 1"):
        layout(PAGED, SPLIT, null_block_id=last + 1)


def test_a_state_table_is_dealt_to_any_ranks() -> None:
    """It maps no slots, so no two of its tokens can share one."""
    ranks = ContextParallel(2, 1, 3)
    assert layout(STATE, context_parallel=ranks).shards(0) == (2, 1)
    with pytest.raises(ConfigurationError, match="interleave of group 0"):
        layout(PAGED, context_parallel=ranks)
