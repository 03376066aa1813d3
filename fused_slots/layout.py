"""Sizes and offsets that every backend shares: where each group's table lies, and its limits.

All groups' tables of one kind lie in one flat int32 arena, so that a kernel needs one base pointer
and a scatter over all groups is one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from fused_slots.faults import INT32_MAX, ConfigurationError, require_int
from fused_slots.groups import ContextParallel, KVCacheGroup, check_shard, require_context_parallel

ARENA_ALIGNMENT = 64
"""int32 elements; every group's table starts on a 256-byte boundary."""


@dataclass(frozen=True)
class TableLayout:
    """A manager's fixed sizes.

    Args:
        groups: the KV cache groups, in the order of their block tables.
        widths: columns of one row, per group.
        max_num_reqs: rows of every table.
        max_num_batched_tokens: width of the slot mappings (the capacity).
        context_parallel: size, rank and interleave.
        replay_window: tokens after `replay_start` that prefix-cacheable groups do not rewrite.
        slot_dtype: torch.int32 or torch.int64.
        num_blocks: pool size in allocation blocks, per group; None = unknown.
        null_block_id: the allocation block that is never written; None = there is none.

    Raises:
        ConfigurationError: a combination that cannot be mapped exactly.
    """

    groups: tuple[KVCacheGroup, ...]
    widths: tuple[int, ...]
    max_num_reqs: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel
    replay_window: int
    slot_dtype: torch.dtype
    num_blocks: tuple[int | None, ...]
    null_block_id: int | None = None

    def __post_init__(self) -> None:
        minima = {"max_num_reqs": 1, "max_num_batched_tokens": 1, "replay_window": 0}
        for field, minimum in minima.items():
            value = require_int(field, getattr(self, field), minimum=minimum)
            object.__setattr__(self, field, value)
        require_context_parallel(self.context_parallel)
        if self.slot_dtype not in (torch.int32, torch.int64):
            raise ConfigurationError(
                "slot_dtype", expected="torch.int32 or torch.int64", actual=str(self.slot_dtype)
            )
        if self.null_block_id is not None:
            null = require_int("null_block_id", self.null_block_id, minimum=0)
            object.__setattr__(self, "null_block_id", null)
        # A packet has so many fields besides its ids if all rows are written (host/packet.py).
        most = INT32_MAX // (3 * (1 + self.num_groups))
        if self.max_num_reqs > most:
            raise ConfigurationError(
                "max_num_reqs",
                expected=f"at most {most} with {self.num_groups} groups: what is staged for all "
                "rows at once must lie within int32 offsets",
                actual=str(self.max_num_reqs),
            )
        object.__setattr__(self, "num_blocks", tuple(map(self._pool_size, range(self.num_groups))))
        for g, group in enumerate(self.groups):
            require_int(f"row width of {self.describe(g)}, in columns", self.widths[g], minimum=1)
            check_shard(group, self.context_parallel, self.describe(g))
            self._check_pool(g, group)
            self._check_null_block(g)

    @property
    def num_groups(self) -> int:
        """Number of KV cache groups (G)."""
        return len(self.groups)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each group's table in the arena, in int32 elements."""
        ends = [0]
        for width in self.widths:
            size = self.max_num_reqs * width
            ends.append(ends[-1] + -(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT)
        return tuple(ends)

    @property
    def arena_size(self) -> int:
        """Elements of one arena (all groups' tables)."""
        return self.offsets[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of a manager's device buffers, without a backend's own metadata."""
        slots = 2 * self.num_groups * self.max_num_batched_tokens * self.slot_dtype.itemsize
        return 4 * (2 * self.arena_size + self.num_groups * self.max_num_reqs) + slots

    @cached_property
    def null_columns(self) -> tuple[int, ...]:
        """Per group n * null_block_id, the first of the null block's n columns.

        -n where there is no null block: no column id lies in [-n, 0).
        """
        null = -1 if self.null_block_id is None else self.null_block_id
        return tuple(null * group.columns_per_block for group in self.groups)

    @property
    def pools(self) -> tuple[str, ...]:
        """Per group the name of the pool whose block ids it shares; "" = a pool of its own."""
        return tuple(group.pool for group in self.groups)

    def shards(self, g: int) -> tuple[int, int]:
        """(S', c') of a group: ranks that share it and this rank's number among them."""
        return self.context_parallel.shards(self.groups[g])

    def describe(self, g: int) -> str:
        """A group as errors name it: its number and, when given, its name."""
        name = self.groups[g].name
        return f"group {g} ({name})" if name else f"group {g}"

    @cached_property
    def max_block_ids(self) -> tuple[int, ...]:
        """The largest allocation block id each group accepts: pool, table and slot dtype."""
        return tuple(
            min(bound for bound, _ in self._block_id_bounds(g)) for g in range(self.num_groups)
        )

    def block_id_limit(self, g: int) -> str:
        """Why `max_block_ids[g]` is what it is, for an error message."""
        return min(self._block_id_bounds(g))[1]

    def _block_id_bounds(self, g: int) -> list[tuple[int, str]]:
        group = self.groups[g]
        n, pool = group.columns_per_block, self.num_blocks[g]
        bounds = [((INT32_MAX - (n - 1)) // n, "its columns must fit the int32 block table")]
        if pool is not None:
            bounds.append((pool - 1, f"num_blocks={pool} is the pool's size"))
        if group.maps_slots and self.slot_dtype is torch.int32:
            bounds.append(
                ((INT32_MAX + 1) // group.block_size - 1, "its last slot must fit slot_dtype int32")
            )
        return bounds

    def _check_null_block(self, g: int) -> None:
        null, limit = self.null_block_id, self._block_id_bounds(g)[0]
        if null is not None and null > limit[0]:
            raise ConfigurationError(
                f"null_block_id in {self.describe(g)}",
                expected=f"a block id in [0, {limit[0]}]: {limit[1]}",
                actual=str(null),
            )

    def _pool_size(self, g: int) -> int | None:
        pool = self.num_blocks[g]
        if pool is None:
            return None
        return require_int(f"num_blocks of {self.describe(g)}", pool, minimum=1)

    def _check_pool(self, g: int, group: KVCacheGroup) -> None:
        pool = self.num_blocks[g]
        if pool is not None and self.max_block_ids[g] < pool - 1:
            raise ConfigurationError(
                f"num_blocks of {self.describe(g)}",
                expected=f"at most {self.max_block_ids[g] + 1} blocks of {group.block_size} "
                f"tokens: {self.block_id_limit(g)}",
                actual=str(pool),
                hint="Use slot_dtype=torch.int64, or a smaller pool",
            )


T = TypeVar("T")


def as_tuple(argument: str, values: Iterable[T]) -> tuple[T, ...]:
    """The entries of a list that a caller passed.

    Raises:
        ConfigurationError: it is no list.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ConfigurationError(argument, expected="a list", actual=repr(values))
    return tuple(values)


def per_group(argument: str, values: Iterable[T], num_groups: int) -> tuple[T, ...]:
    """The entries of a list that has one for each group.

    Raises:
        ConfigurationError: it is no list, or has another length.
    """
    values = as_tuple(argument, values)
    if len(values) != num_groups:
        raise ConfigurationError(
            argument,
            expected=f"{num_groups} entries, one per KV cache group",
            actual=f"{len(values)}",
        )
    return values


def pool_sizes(
    num_blocks: int | Sequence[int | None] | None, num_groups: int
) -> tuple[int | None, ...]:
    """One pool size per group, of a number for all or a list.

    Raises:
        ConfigurationError: it has another length.
    """
    if num_blocks is None or isinstance(num_blocks, (int, np.integer)):
        num_blocks = [num_blocks] * num_groups
    return per_group("num_blocks", num_blocks, num_groups)
