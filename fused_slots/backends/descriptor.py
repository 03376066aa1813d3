"""The packed descriptor that kernels read each group's numbers from (kernels/layout.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fused_slots.faults import INT32_MAX, ConfigurationError
from fused_slots.layout import ARENA_ALIGNMENT, TableLayout


def descriptor_lines(layout: TableLayout) -> torch.Tensor:
    """int32 [G, DESCRIPTOR_WIDTH] on the host, one line a group.

    Args:
        layout: the manager's sizes.
    """
    from fused_slots.kernels import layout as field

    lines = np.zeros((layout.num_groups, field.DESCRIPTOR_WIDTH.value), dtype=np.int32)
    for g, group in enumerate(layout.groups):
        shards, rank = layout.shards(g)
        column_size, virtual_size = group.tokens_per_column, group.block_size * shards
        numbers = (
            (field.OFFSET, layout.offsets[g] // ARENA_ALIGNMENT),
            (field.WIDTH, layout.widths[g]),
            (field.COLUMN_SIZE, column_size),
            (field.COLUMN_SHIFT, shift_of(column_size)),
            (field.VIRTUAL_SIZE, virtual_size),
            (field.VIRTUAL_SHIFT, shift_of(virtual_size)),
            (field.SHARDS, shards),
            (field.SHARDS_SHIFT, shift_of(shards)),
            (field.RANK, rank),
            (field.COLUMNS_PER_BLOCK, group.columns_per_block),
            (field.KIND, group.kind),
            (field.CACHEABLE, int(bool(group.prefix_cacheable))),
            (field.REACH, group.sliding_window_reach),
            (field.NULL_COLUMN, layout.null_columns[g]),
        )
        for column, number in numbers:
            # What may be larger divides or bounds int32 numbers alone.
            lines[g, column.value] = min(number, INT32_MAX)
    return torch.from_numpy(lines)


def check_int32_positions(layout: TableLayout) -> None:
    """Refuse groups whose rows cover more tokens than int32 positions can name.

    Raises:
        ConfigurationError: names the group and the numbers.
    """
    for g, group in enumerate(layout.groups):
        if not group.kind.is_paged:
            continue
        shards, _ = layout.shards(g)
        block = group.block_size * shards
        tokens = layout.widths[g] * group.tokens_per_column * shards
        # A block more, for the clamped positions of sharded groups.
        if tokens + block > INT32_MAX:
            raise ConfigurationError(
                f"max_num_blocks of {layout.describe(g)}",
                expected=f"rows of at most {INT32_MAX - block} tokens over all context parallel "
                "ranks: kernels compute positions in int32",
                actual=f"{tokens} tokens",
            )


def position_divisors(layout: TableLayout) -> Iterator[int]:
    """Every number that a kernel divides positions by."""
    sharded = layout.context_parallel.size > 1
    for g, group in enumerate(layout.groups):
        if group.maps_slots or group.sliding_window_reach:
            yield group.tokens_per_column
        if sharded and group.maps_slots:
            shards, _ = layout.shards(g)
            yield from (group.block_size * shards, shards)
    if sharded:
        yield layout.context_parallel.interleave


def is_power_of_two(value: int) -> bool:
    """Whether a positive number is a power of two."""
    return value & (value - 1) == 0


def shift_of(value: int) -> int:
    """log2 of a power of two; 0 for other values, where no kernel shifts."""
    return value.bit_length() - 1 if is_power_of_two(value) else 0
