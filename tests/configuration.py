"""Random configurations of a manager, and the managers that the simulator can drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode

INT32_MAX = 2**31 - 1

KINDS = ("paged", "split", "odd", "sliding", "none", "ring", "replicated", "uncacheable")
"""Kinds of groups; "odd" has a block size that is no power of two."""

FEATURES = frozenset(
    {
        "step",  # one call for apply, gather and compute
        "map_tokens",
        "faults",  # malformed batches are padded and counted
        "replay",
        "errors",  # bad appends raise and change nothing
        "explain",
        "integrity",
        "poison",  # cells past a row's columns may be overwritten with poison
        "clean_buffers",  # slots are PAD from birth, gathered rows beyond num_reqs_padded zero
        "dummies",  # idx_mapping may hold -1
        "other_out",  # slots go into an out of any width and dtype
        "redirect",
    }
)


NEW = frozenset(
    {
        "null_block",  # a block that is never written
        "replay_len",  # a length of replay for each batch entry
        "row_writes",  # rows are cleared, cut and written from a block on
        "replicated_rings",  # beside sharded groups
        "repeats",  # checked: positions that a batch entry repeats are counted
    }
)
"""What the CPU backend offers, and the others as soon as they have it."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings of one manager, and the block ids that its pools deal."""

    groups: tuple[KVCacheGroup, ...]
    max_num_reqs: int
    capacity: int
    context_parallel: ContextParallel
    replay_window: int
    slot_dtype: torch.dtype
    first_ids: tuple[int, ...]
    pool_sizes: tuple[int, ...]
    num_blocks_known: bool
    checked: bool
    aligned_rows: bool
    max_model_len: int
    null_block_id: int | None = None

    def shards(self, g: int) -> int:
        """Ranks that share group g's blocks."""
        return self.context_parallel.size if self.groups[g].dcp_sharded else 1

    def tokens_per_block(self, g: int) -> int:
        """Positions that one allocation block of group g covers, over all ranks."""
        return self.groups[g].block_size * self.shards(g)

    @property
    def num_blocks(self) -> list[int] | None:
        """Pool sizes as the manager gets them."""
        if not self.num_blocks_known:
            return None
        return [a + b for a, b in zip(self.first_ids, self.pool_sizes, strict=True)]

    def max_block_id(self, g: int) -> int:
        """The largest id that group g must accept."""
        limit = id_limit(self.groups[g], self.slot_dtype)
        return self.first_ids[g] + self.pool_sizes[g] - 1 if self.num_blocks_known else limit


def id_limit(group: KVCacheGroup, slot_dtype: torch.dtype) -> int:
    """The largest block id whose columns fit int32 and whose slots fit slot_dtype."""
    per_block = group.block_size // (group.kernel_block_size or group.block_size)
    limit = (INT32_MAX - per_block + 1) // per_block
    if slot_dtype is torch.int32 and group.slot_mapping_mode is not SlotMappingMode.NONE:
        limit = min(limit, 2**31 // group.block_size - 1)
    return limit


@dataclass(frozen=True)
class Target:
    """A manager to drive: how to build it, where it runs, what it promises."""

    name: str
    make: Callable[[Config], Any]
    device: str = "cpu"
    features: frozenset[str] = FEATURES
    kinds: tuple[str, ...] = KINDS
    aligned_rows: bool = True
    after_step: Callable[[Any], None] | None = field(default=None)
    """Called with the manager after each step; raises when it finds something."""


def make_manager(config: Config, device: str = "cpu") -> AscendBlockTables:
    """A fused_slots manager, by either constructor."""
    cp = config.context_parallel
    if config.aligned_rows:
        return AscendBlockTables.from_groups(
            config.groups,
            max_num_reqs=config.max_num_reqs,
            max_num_batched_tokens=config.capacity,
            device=device,
            context_parallel=cp,
            replay_window=config.replay_window,
            slot_dtype=config.slot_dtype,
            num_blocks=config.num_blocks,
            checked=config.checked,
            null_block_id=config.null_block_id,
        )
    groups = config.groups
    return AscendBlockTables(
        block_sizes=[group.block_size for group in groups],
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.capacity,
        max_num_blocks_per_group=[group.max_num_blocks for group in groups],
        device=device,
        slot_mapping_enabled=[g.slot_mapping_mode is not SlotMappingMode.NONE for g in groups],
        dcp_sharded=[group.dcp_sharded for group in groups],
        sliding_window_reach=[group.sliding_window_reach for group in groups],
        cp_size=cp.size,
        cp_rank=cp.rank,
        cp_interleave=cp.interleave,
        kernel_block_sizes=[group.tokens_per_column for group in groups],
        circular=[group.circular for group in groups],
        prefix_cacheable=[group.prefix_cacheable for group in groups],
        replay_window=config.replay_window,
        slot_dtype=config.slot_dtype,
        num_blocks=config.num_blocks,
        checked=config.checked,
        null_block_id=config.null_block_id,
    )


def random_config(rng: Random, size: str, target: Target) -> Config:
    """A configuration; size "small" keeps slow interpreters busy for milliseconds only."""
    small = size == "small"
    num_groups = rng.randint(1, 4) if small or rng.random() < 0.7 else rng.randint(5, 16)
    cp = _context_parallel(rng)
    max_model_len = rng.choice((24, 40, 96) if small else (24, 64, 160, 400))
    aligned_rows = rng.random() < 0.6 and target.aligned_rows
    rings = cp.size == 1 or "replicated_rings" in target.features
    kinds = [kind for kind in target.kinds if kind != "ring" or rings]
    kinds += [kind for kind in kinds if kind == "sliding"]  # the kind with the most rules
    groups = tuple(
        _group(rng, rng.choice(kinds), cp, max_model_len, f"g{g}" if g % 2 else "")
        for g in range(num_groups)
    )
    slot_dtype = rng.choice((torch.int32, torch.int64))
    max_num_reqs = rng.randint(1, 6 if small else 10)
    pool_sizes = [
        max(int(group.max_num_blocks * max_num_reqs * rng.uniform(0.5, 1.1)), group.max_num_blocks)
        for group in groups
    ]
    known = rng.random() < 0.5
    first_ids = [
        _first_id(rng, group, slot_dtype, pool, known)
        for group, pool in zip(groups, pool_sizes, strict=True)
    ]
    null_block_id = None
    if "null_block" in target.features and rng.random() < 0.5:
        limit = min(id_limit(group, torch.int64) for group in groups)
        null_block_id = rng.choice((0, min(rng.choice(first_ids), limit)))
    return Config(
        groups=groups,
        max_num_reqs=max_num_reqs,
        capacity=rng.randint(4, 40) if small or rng.random() < 0.8 else rng.randint(41, 160),
        context_parallel=cp,
        replay_window=rng.choice((0, 0, 1, 3, 4, 8)) if "replay" in target.features else 0,
        slot_dtype=slot_dtype,
        first_ids=tuple(first_ids),
        pool_sizes=tuple(pool_sizes),
        num_blocks_known=known,
        checked=rng.random() < 0.4,
        aligned_rows=aligned_rows,
        max_model_len=max_model_len,
        null_block_id=null_block_id,
    )


def _context_parallel(rng: Random) -> ContextParallel:
    size = rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5, 7, 8))
    return ContextParallel(size, rng.randrange(size), rng.choice((1, 1, 2, 3, 4, 8)))


def _group(
    rng: Random, kind: str, cp: ContextParallel, max_model_len: int, name: str
) -> KVCacheGroup:
    sharded = kind != "replicated" and rng.random() < 0.85
    if kind == "none":
        size = rng.choice((1, max_model_len, 4096))
        return KVCacheGroup(
            block_size=size * cp.interleave,
            max_num_blocks=rng.randint(1, 4),
            slot_mapping_mode=SlotMappingMode.NONE,
            dcp_sharded=sharded,
            prefix_cacheable=rng.random() < 0.5,
            name=name,
        )
    if kind == "ring":
        return KVCacheGroup(
            block_size=rng.choice((1, 3, 4, 8, 16)),
            max_num_blocks=1,
            circular=True,
            prefix_cacheable=False,
            name=name,
        )
    kernel_size = rng.choice((3, 5, 6, 12, 20) if kind == "odd" else (1, 2, 4, 8, 16, 32))
    block_size = kernel_size * (rng.choice((2, 3, 4)) if kind == "split" else 1)
    if sharded and cp.size > 1 and block_size % cp.interleave:
        block_size *= cp.interleave
        kernel_size = rng.choice((kernel_size, block_size))
    shards = cp.size if sharded else 1
    return KVCacheGroup(
        block_size=block_size,
        max_num_blocks=-(-max_model_len // (block_size * shards)) + rng.randint(0, 1),
        kernel_block_size=kernel_size,
        dcp_sharded=sharded,
        prefix_cacheable=kind != "uncacheable",
        sliding_window_reach=rng.randint(1, max_model_len) if kind == "sliding" else 0,
        name=name,
    )


def _first_id(
    rng: Random, group: KVCacheGroup, slot_dtype: torch.dtype, pool: int, num_blocks_known: bool
) -> int:
    """Where a pool's ids begin: mostly 1, sometimes at an edge of an exact range."""
    last = id_limit(group, slot_dtype) - pool + 1
    if num_blocks_known:
        last = min(last, INT32_MAX - pool)  # num_blocks, one more than the last id, is an int32
    edge = rng.choice((1, 1, 1, 1, 2**24, 2**24 // group.block_size, 2**27, last))
    return min(max(edge - rng.randint(0, 2), 1), last)
