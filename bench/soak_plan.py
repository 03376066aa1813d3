"""What a soak goes through: configurations of managers, and steps planned ahead in chunks.

The arrays of a chunk's steps are packed into one array per dtype, so that steps on a device need no
transfer of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode

Array = npt.NDArray[Any]
Views = dict[str, dict[str, Array]]
Append = tuple[int, list[list[int]], bool]

JUNK = 10**9
"""Stands where nothing may read."""

DRAFTS = 12
"""Most tokens of a call of map_tokens."""


@dataclass(frozen=True)
class World:
    """A manager's configuration."""

    name: str
    groups: tuple[KVCacheGroup, ...]
    max_len: int
    num_rows: int = 12
    capacity: int = 96
    replay_window: int = 8
    context_parallel: ContextParallel = ContextParallel()  # noqa: RUF009 - frozen, no state

    def shards(self, g: int) -> int:
        return self.context_parallel.size if self.groups[g].dcp_sharded else 1

    def tokens_per_block(self, g: int) -> int:
        """Tokens of a request that one block makes room for; rings and states hold all."""
        group = self.groups[g]
        if group.circular or not group.maps_slots:
            return self.max_len
        return group.block_size * self.shards(g)


STATE = KVCacheGroup(
    256, 2, slot_mapping_mode=SlotMappingMode.NONE, dcp_sharded=False, name="state"
)
RING = KVCacheGroup(8, 1, circular=True, dcp_sharded=False, prefix_cacheable=False, name="ring")
MIXED = (
    KVCacheGroup(16, 16),
    KVCacheGroup(32, 8, 16, sliding_window_reach=40),
    KVCacheGroup(12, 22, 4, prefix_cacheable=False),
    KVCacheGroup(64, 4, dcp_sharded=False),
    STATE,
    RING,
)
WORLDS = (
    World("mixed groups", MIXED, 256),
    World("context parallel", MIXED[:-1], 256, context_parallel=ContextParallel(2, 1, 4)),
    World("long rows", (KVCacheGroup(1, 2304), KVCacheGroup(4, 576, 2), RING), 2304, num_rows=6),
)
"""What a soak goes through in turns; the last has rows that several programs share."""


class Step(NamedTuple):
    """One planned step; its arrays lie in the chunk at its place.

    `wide_index` chooses int64 for idx_mapping and, for drafts and dummies, which buffer is used.
    """

    kind: str
    appends: list[Append]
    num_reqs: int
    num_reqs_padded: int
    num_tokens: int
    num_tokens_padded: int
    wide_index: bool
    with_computed: bool
    with_replay: bool
    num_drafts: int
    end_of_writes: int


class Fields:
    """Which arrays a step has and where they lie in the chunk's rows, per dtype."""

    def __init__(self, world: World) -> None:
        rows, capacity, groups = world.num_rows, world.capacity, len(world.groups)
        int64 = {
            "idx": rows, "positions": capacity, "draft_rows": DRAFTS, "draft_positions": DRAFTS,
            # The oracle's own view: the empty row and position 0 where there is no token.
            "entry_rows": rows, "entry_computed": rows,
            "token_rows": capacity, "token_positions": capacity,
            "token_drafts": DRAFTS, "token_draft_positions": DRAFTS,
        }  # fmt: skip
        int32 = {
            "idx": rows, "starts": rows + 1, "replay": rows, "computed": rows,
            "lengths": (rows + 1) * groups,
        }  # fmt: skip
        masks = {"wanted": capacity, "not_replayed": capacity, "wanted_drafts": DRAFTS}
        self.sizes = {"int64": int64, "int32": int32, "bool": masks}
        self.parts: dict[str, dict[str, slice]] = {}
        for kind, sizes in self.sizes.items():
            ends = np.cumsum([*sizes.values()]).tolist()
            begins = [0, *ends]
            self.parts[kind] = dict(zip(sizes, map(slice, begins, ends), strict=False))


@dataclass
class Chunk:
    """Planned steps and their arrays, one row a step, and the cells that they write."""

    fields: Fields
    num_steps: int
    steps: list[Step] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    """Elements of the tables [num_rows + 1, all columns of all groups] that change, in order."""
    values: list[int] = field(default_factory=list)
    unknown_rows: int = 0
    """Tokens of drafts whose row does not exist."""

    def __post_init__(self) -> None:
        self.arrays = {
            kind: np.zeros((self.num_steps, sum(sizes.values())), dtype=kind)
            for kind, sizes in self.fields.sizes.items()
        }

    def views(self, place: int) -> Views:
        """A step's arrays by dtype and name."""
        return {
            kind: {name: self.arrays[kind][place, part] for name, part in parts.items()}
            for kind, parts in self.fields.parts.items()
        }
