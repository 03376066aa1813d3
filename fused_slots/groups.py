"""KV cache groups: what one block table of a hybrid model looks like.

A group is a set of layers that share a block table. `block_size` (K) is what the KV manager
allocates, `kernel_block_size` (B) is what one table column covers for the attention kernel, and
n = K / B columns make one allocation block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from math import gcd
from typing import Any

from fused_slots.faults import ConfigurationError, require_bool, require_int

PAD_SLOT_ID = -1
"""The slot of a token whose key and value must not be written."""

NULL_BLOCK_ID = 0
"""The block that the KV manager never hands out; masked columns point to it."""


class SlotMappingMode(Enum):
    """How a group turns token positions into slots."""

    TOKEN_TO_KV_SLOT = "token_to_kv_slot"
    """Every token has a slot in a block (attention KV)."""

    NONE = "none"
    """The table holds state indices (Mamba, GDN); tokens have no slots."""


class GroupKind(IntEnum):
    """What the rows of a group hold; all that follows from it on the host stands here.

    The numbers are those of the kernels. docs/design.md walks through adding a kind.
    """

    STATE = 0
    """State indices (Mamba, GDN), read by row; tokens have no slots."""

    RING = 1
    """One block, used as a ring of slots."""

    PAGED = 2
    """Blocks of consecutive positions."""

    @property
    def maps_slots(self) -> bool:
        """Whether tokens have slots; otherwise they are PAD everywhere."""
        return self is not GroupKind.STATE

    @property
    def is_paged(self) -> bool:
        """Whether a row grows with its positions: aligned, split, dealt to ranks."""
        return self is GroupKind.PAGED

    def locate(self, positions: Any, block_size: int) -> tuple[Any, Any]:
        """Column and offset of positions in a row that does not grow: integers or an array."""
        return positions * 0, positions % block_size

    @property
    def label(self) -> str:
        """The kind as reports name it."""
        return self.name.lower()


def get_block_table_width(
    max_num_blocks: int,
    block_size: int,
    kernel_block_size: int | None = None,
    *,
    token_alignment: int | None = 128,
) -> int:
    """Columns of one row that can hold `max_num_blocks` allocation blocks (vLLM's rule).

    The number of allocation blocks is rounded up until the row covers a multiple of
    `token_alignment` tokens, then each block becomes `block_size // kernel_block_size` columns.

    Args:
        max_num_blocks: allocation blocks of one request, >= 0.
        block_size: tokens of one allocation block.
        kernel_block_size: tokens of one column; must divide `block_size`; None = `block_size`.
        token_alignment: tokens; None = no rounding (state tables and rings).

    Raises:
        ConfigurationError: a size is not positive, or the split is not even.
    """
    columns_per_block = _columns_per_block(block_size, kernel_block_size)
    max_num_blocks = require_int("max_num_blocks", max_num_blocks, minimum=0)
    if token_alignment is not None:
        token_alignment = require_int("token_alignment", token_alignment, minimum=1)
        multiple = token_alignment // gcd(token_alignment, block_size)
        max_num_blocks = -(-max_num_blocks // multiple) * multiple
    return max_num_blocks * columns_per_block


@dataclass(frozen=True)
class KVCacheGroup:
    """One KV cache group of a hybrid model.

    Args:
        block_size: tokens per allocation block (K), > 0.
        max_num_blocks: allocation blocks that one request can hold, >= 1; 1 in a ring. The row
            of a paged group may take more: it is aligned to 128 tokens (`get_block_table_width`).
        kernel_block_size: tokens per table column (B); divides `block_size`; None = `block_size`.
        slot_mapping_mode: TOKEN_TO_KV_SLOT, or NONE for state tables.
        circular: the row holds one block, used as a ring of `kernel_block_size` slots. It
            belongs to one request, so `prefix_cacheable` is refused.
        dcp_sharded: context parallelism shards this group; otherwise every rank holds it whole.
            None = True, False for a ring.
        prefix_cacheable: its blocks can be shared through the prefix cache, so replayed tokens
            must not be written to them again. None = True, False for a ring.
        sliding_window_reach: tokens below a request's first scheduled position that attention
            may still read; 0 = all of them.
        name: shown in errors and reports.
        pool: groups with one name here take their block ids from one pool; "" = its own.

    Raises:
        ConfigurationError: names the field, what was expected and what came.
    """

    block_size: int
    max_num_blocks: int
    kernel_block_size: int | None = None
    slot_mapping_mode: SlotMappingMode = SlotMappingMode.TOKEN_TO_KV_SLOT
    circular: bool = False
    dcp_sharded: bool | None = None
    prefix_cacheable: bool | None = None
    sliding_window_reach: int = 0
    name: str = ""
    pool: str = ""

    def __post_init__(self) -> None:
        try:
            self._normalise()
        except ConfigurationError as error:
            if isinstance(self.name, str) and self.name:
                raise error.within(f"group ({self.name})") from None
            raise

    def _normalise(self) -> None:
        columns_per_block = _columns_per_block(self.block_size, self.kernel_block_size)
        minima = {"block_size": 1, "max_num_blocks": 1, "sliding_window_reach": 0}
        for field, minimum in minima.items():
            value = require_int(field, getattr(self, field), minimum=minimum)
            object.__setattr__(self, field, value)
        object.__setattr__(self, "kernel_block_size", self.block_size // columns_per_block)
        object.__setattr__(self, "circular", require_bool("circular", self.circular))
        for field in ("dcp_sharded", "prefix_cacheable"):
            value = getattr(self, field)
            value = not self.circular if value is None else require_bool(field, value)
            object.__setattr__(self, field, value)
        for field in ("name", "pool"):
            if not isinstance(getattr(self, field), str):
                raise ConfigurationError(field, expected="a str", actual=repr(getattr(self, field)))
        if not isinstance(self.slot_mapping_mode, SlotMappingMode):
            raise ConfigurationError(
                "slot_mapping_mode",
                expected="a fused_slots.SlotMappingMode",
                actual=repr(self.slot_mapping_mode),
            )
        if self.circular:
            self._check_ring(columns_per_block)

    def _check_ring(self, columns_per_block: int) -> None:
        if columns_per_block != 1:
            raise ConfigurationError(
                "kernel_block_size",
                expected=f"block_size ({self.block_size}) in a circular group: its ring is one "
                "block that is never split",
                actual=str(self.kernel_block_size),
            )
        if self.kind is GroupKind.RING and self.max_num_blocks != 1:
            raise ConfigurationError(
                "max_num_blocks",
                expected="1 in a circular group: its ring is one block",
                actual=str(self.max_num_blocks),
            )
        if self.prefix_cacheable:
            raise ConfigurationError(
                "prefix_cacheable",
                expected="False or None in a circular group: a ring belongs to one request",
                actual="True",
            )

    @property
    def tokens_per_column(self) -> int:
        """B: tokens that one table column covers."""
        return self.kernel_block_size or self.block_size

    @property
    def columns_per_block(self) -> int:
        """n: table columns of one allocation block."""
        return self.block_size // self.tokens_per_column

    @cached_property
    def kind(self) -> GroupKind:
        """What the rows hold; `slot_mapping_mode` goes before `circular`."""
        if self.slot_mapping_mode is SlotMappingMode.NONE:
            return GroupKind.STATE
        return GroupKind.RING if self.circular else GroupKind.PAGED

    @property
    def maps_slots(self) -> bool:
        """False for a state table, whose slots are PAD everywhere."""
        return self.kind.maps_slots

    @property
    def row_width(self) -> int:
        """Columns of one row; only those of paged groups are aligned."""
        return get_block_table_width(
            self.max_num_blocks,
            self.block_size,
            self.kernel_block_size,
            token_alignment=128 if self.kind.is_paged else None,
        )


@dataclass(frozen=True)
class ContextParallel:
    """How tokens of a sharded group are dealt to the ranks of a context parallel group.

    Args:
        size: ranks (S), >= 1.
        rank: this rank (c), 0 <= rank < size.
        interleave: consecutive tokens that stay on one rank (I); must divide the block size of
            every sharded group.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for field, minimum in {"size": 1, "rank": 0, "interleave": 1}.items():
            name = f"context_parallel.{field}"
            value = require_int(name, getattr(self, field), minimum=minimum)
            object.__setattr__(self, field, value)
        if self.rank >= self.size:
            raise ConfigurationError(
                "context_parallel.rank",
                expected=f"0 <= rank < size ({self.size})",
                actual=str(self.rank),
            )

    def shards(self, group: KVCacheGroup) -> tuple[int, int]:
        """(S', c') of a group: ranks that share it and this rank's number among them."""
        return (self.size, self.rank) if group.dcp_sharded else (1, 0)


def require_context_parallel(value: object) -> ContextParallel:
    """`value`, if it is one.

    Raises:
        ConfigurationError: it is anything else.
    """
    if not isinstance(value, ContextParallel):
        raise ConfigurationError(
            "context_parallel", expected="a fused_slots.ContextParallel", actual=repr(value)
        )
    return value


def check_shard(group: KVCacheGroup, context_parallel: ContextParallel, name: str) -> None:
    """Check that the group can be dealt to these ranks, if it is at all.

    Raises:
        ConfigurationError: names the group as `name` does, and the numbers.
    """
    if context_parallel.size == 1 or not group.dcp_sharded or not group.maps_slots:
        return
    if not group.kind.is_paged:
        raise ConfigurationError(
            f"dcp_sharded of {name}",
            expected="False or None: a ring of one block cannot be dealt to "
            f"{context_parallel.size} ranks, every rank holds it whole",
            actual="True",
        )
    if group.block_size % context_parallel.interleave:
        raise ConfigurationError(
            f"context_parallel.interleave of {name}",
            expected=f"a divisor of block_size ({group.block_size}), so that no two tokens "
            "share a slot",
            actual=str(context_parallel.interleave),
            hint="Change interleave, or set dcp_sharded=False if every rank holds this group",
        )


def _columns_per_block(block_size: int, kernel_block_size: int | None) -> int:
    block_size = require_int("block_size", block_size, minimum=1)
    if kernel_block_size is None:
        return 1
    kernel_block_size = require_int("kernel_block_size", kernel_block_size, minimum=1)
    if block_size % kernel_block_size:
        raise ConfigurationError(
            "kernel_block_size",
            expected=f"a divisor of block_size ({block_size})",
            actual=str(kernel_block_size),
        )
    return block_size // kernel_block_size
