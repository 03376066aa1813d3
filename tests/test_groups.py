"""Groups, context parallel settings and the width rule."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from fused_slots import (
    PAD_SLOT_ID,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
    get_block_table_width,
)
from fused_slots.faults import ConfigurationError


@pytest.mark.parametrize(
    ("max_num_blocks", "block_size", "kernel_block_size", "alignment", "width"),
    [
        (1, 16, None, 128, 8),  # 8 blocks of 16 make 128 tokens
        (8, 16, None, 128, 8),
        (9, 16, None, 128, 16),
        (1, 128, None, 128, 1),
        (3, 256, None, 128, 3),
        (1, 64, 32, 128, 4),  # two blocks of two columns
        (5, 48, None, 128, 8),  # 48 x 8 = 384 is the least multiple of 128
        (1, 1, None, 128, 128),
        (0, 16, None, 128, 0),
        (3, 16, None, None, 3),
        (3, 64, 16, None, 12),
        (3, 16, None, 1, 3),
        (1, 640, 128, 128, 5),
        (7, 100, 50, 64, 32),  # 100 x 16 = 1600 = 25 x 64: 16 blocks of two columns
    ],
)
def test_row_width(
    max_num_blocks: int,
    block_size: int,
    kernel_block_size: int | None,
    alignment: int | None,
    width: int,
) -> None:
    assert (
        get_block_table_width(
            max_num_blocks, block_size, kernel_block_size, token_alignment=alignment
        )
        == width
    )


def test_width_covers_the_blocks_and_whole_alignments() -> None:
    for block_size in (1, 3, 16, 48, 100, 128, 1000):
        for max_num_blocks in (1, 2, 7, 63, 64, 65):
            width = get_block_table_width(max_num_blocks, block_size)
            assert width >= max_num_blocks
            assert width * block_size % 128 == 0
            smaller = range(max_num_blocks, width)
            assert all(blocks * block_size % 128 for blocks in smaller)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"max_num_blocks": -1}, "max_num_blocks"),
        ({"token_alignment": 0}, "token_alignment"),
        ({"token_alignment": 1.5}, "token_alignment"),
        ({"block_size": 0}, "block_size"),
        ({"kernel_block_size": 5}, "kernel_block_size"),
    ],
)
def test_width_refuses(arguments: dict[str, int], argument: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        get_block_table_width(**{"max_num_blocks": 1, "block_size": 16, **arguments})
    assert raised.value.argument == argument


def test_state_tables_and_rings_are_not_aligned() -> None:
    assert KVCacheGroup(16, 3).row_width == 8
    assert KVCacheGroup(16, 3, slot_mapping_mode=SlotMappingMode.NONE).row_width == 3
    assert KVCacheGroup(16, 1, circular=True).row_width == 1
    assert KVCacheGroup(64, 1, 16, slot_mapping_mode=SlotMappingMode.NONE).row_width == 4


def test_kernel_block_size_defaults_to_the_block_size() -> None:
    group = KVCacheGroup(block_size=48, max_num_blocks=2)
    assert (group.kernel_block_size, group.tokens_per_column, group.columns_per_block) == (
        48,
        48,
        1,
    )
    split = KVCacheGroup(block_size=48, max_num_blocks=2, kernel_block_size=16)
    assert (split.tokens_per_column, split.columns_per_block) == (16, 3)


def test_groups_are_values() -> None:
    group = KVCacheGroup(16, 8, sliding_window_reach=3, name="window")
    assert group == KVCacheGroup(16, 8, kernel_block_size=16, sliding_window_reach=3, name="window")
    assert hash(group) == hash(KVCacheGroup(16, 8, sliding_window_reach=3, name="window"))
    assert pickle.loads(pickle.dumps(group)) == group
    assert dataclasses.replace(group, name="").name == ""
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.block_size = 32  # type: ignore[misc]


def test_replacing_the_block_size_keeps_a_divisor() -> None:
    with pytest.raises(ConfigurationError, match="kernel_block_size"):
        dataclasses.replace(KVCacheGroup(48, 8), block_size=64)


def test_maps_slots_only_outside_state_groups() -> None:
    assert KVCacheGroup(16, 8).maps_slots
    assert not KVCacheGroup(16, 8, slot_mapping_mode=SlotMappingMode.NONE).maps_slots


def test_one_rank_is_the_default() -> None:
    assert ContextParallel() == ContextParallel(size=1, rank=0, interleave=1)
    assert ContextParallel(4, 3, 16).rank == 3


def test_the_padding_slot_is_minus_one() -> None:
    assert PAD_SLOT_ID == -1
