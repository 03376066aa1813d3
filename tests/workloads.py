"""Seeded workloads that tests and benchmarks share: groups, sizes, rows and consecutive steps.

load = workload("decode 256x6", context=8192)
tables = load.make_tables("cuda")
for row, block_ids, overwrite in load.appends:      # set the rows up
    tables.append_block_ids(row, block_ids, overwrite=overwrite)
arrays = load.tensors("cuda")                       # this step's arguments
load.next_step()                                    # load.appends, .positions ... of the next
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode

Append = tuple[int, tuple[list[int], ...], bool]
"""Row, one list of block ids per group, overwrite."""

HEADROOM = 1024
"""Tokens that a request grows by before it starts again at its first length."""


class StepTensors(NamedTuple):
    """One step's arguments on a device, for `AscendBlockTables.step` and its parts."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_computed_tokens: torch.Tensor


@dataclass
class Workload:
    """Requests that take a step together; `next_step` moves them on.

    Args:
        name: as `workload` takes it.
        groups: the KV cache groups.
        query_lens: tokens that each request brings to a step.
        contexts: computed tokens that each request begins with.
        max_num_reqs: rows of the tables.
        max_num_batched_tokens: the capacity.
        context_parallel: size, rank and interleave.
        speculative: a step's tokens are one token and drafts, of which some are accepted.
        seed: rows, block ids and acceptance follow from it.

    Attributes:
        appends: what to stage before this step.
        idx_mapping: int32 [num_reqs].
        query_start_loc: int32 [num_reqs + 1].
        positions: int64 [num_tokens].
        num_computed_tokens: int32 [max_num_reqs], by row.
    """

    name: str
    groups: tuple[KVCacheGroup, ...]
    query_lens: Sequence[int]
    contexts: Sequence[int]
    max_num_reqs: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel = ContextParallel()  # noqa: RUF009 - frozen, no state
    speculative: bool = False
    seed: int = 0
    appends: list[Append] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._lens = np.array(self.query_lens, dtype=np.int64)
        self._first = np.array(self.contexts, dtype=np.int64)
        self._computed = self._first.copy()
        self._limit = self._first + max(HEADROOM, 2 * int(self._lens.max()))
        num_reqs = len(self._lens)
        rows = self._rng.permutation(self.max_num_reqs)[:num_reqs]
        self.idx_mapping: npt.NDArray[np.int32] = rows.astype(np.int32)
        self.query_start_loc = np.concatenate([[0], np.cumsum(self._lens)]).astype(np.int32)
        self.num_computed_tokens = np.zeros(self.max_num_reqs, dtype=np.int32)
        self._held = np.zeros((len(self.groups), num_reqs), dtype=np.int64)
        self._block_ids = [
            self._rng.permutation(num_reqs * self._most_blocks(g)).reshape(num_reqs, -1) + 1
            for g in range(len(self.groups))
        ]
        self._prepare(np.ones(num_reqs, dtype=bool))

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def make_tables(self, device: str | torch.device, **settings: Any) -> AscendBlockTables:
        """A manager of this workload's sizes, its rows empty."""
        return AscendBlockTables.from_groups(
            self.groups,
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            device=device,
            context_parallel=self.context_parallel,
            **settings,
        )

    def vllm_arguments(self, device: str | torch.device) -> dict[str, Any]:
        """Keywords of vLLM 0.33's v2 `BlockTables` for the same sizes (no kernel splitting)."""
        cp = self.context_parallel
        return {
            "block_sizes": [group.block_size for group in self.groups],
            "max_num_reqs": self.max_num_reqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_blocks_per_group": [group.row_width for group in self.groups],
            "device": torch.device(device),
            "slot_mapping_enabled": [group.maps_slots for group in self.groups],
            "dcp_sharded": [group.dcp_sharded for group in self.groups],
            "sliding_window_reach": [group.sliding_window_reach for group in self.groups],
            "cp_size": cp.size,
            "cp_rank": cp.rank,
            "cp_interleave": cp.interleave,
        }

    def tensors(self, device: str | torch.device) -> StepTensors:
        """Fresh tensors of this step."""
        arrays = (
            self.idx_mapping,
            self.query_start_loc,
            self.positions,
            self.num_computed_tokens,
        )
        return StepTensors(*(torch.from_numpy(array.copy()).to(device) for array in arrays))

    def next_step(self) -> list[Append]:
        """Move every request on; returns (and keeps in `appends`) what the step must stage."""
        if self.speculative:
            self._computed += self._rng.integers(1, self._lens, endpoint=True)
        else:
            self._computed += self._lens
        again = self._computed + self._lens > self._limit
        self._computed[again] = self._first[again]
        self._prepare(again)
        return self.appends

    def _prepare(self, fresh: npt.NDArray[np.bool_]) -> None:
        """Arrays and appends of the step that begins at `_computed`."""
        starts = self.query_start_loc[:-1].astype(np.int64)
        within = np.arange(self.num_tokens) - np.repeat(starts, self._lens)
        self.positions: npt.NDArray[np.int64] = np.repeat(self._computed, self._lens) + within
        self.num_computed_tokens[self.idx_mapping] = self._computed
        needed = np.stack(
            [
                self._blocks(g, self._computed + self._lens)
                if group_is_paged(group)
                else np.full(self.num_reqs, group.max_num_blocks)
                for g, group in enumerate(self.groups)
            ]
        )
        self._held[:, fresh] = 0
        grown = np.flatnonzero((needed > self._held).any(axis=0))
        self.appends = [
            (
                int(self.idx_mapping[b]),
                tuple(
                    ids[b, self._held[g, b] : needed[g, b]].tolist()
                    for g, ids in enumerate(self._block_ids)
                ),
                bool(fresh[b]),
            )
            for b in grown.tolist()
        ]
        self._held = np.maximum(self._held, needed)

    def _blocks(self, g: int, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        group = self.groups[g]
        shards = self.context_parallel.size if group.dcp_sharded else 1
        return -(-num_tokens // (group.block_size * shards))

    def _most_blocks(self, g: int) -> int:
        if not group_is_paged(self.groups[g]):
            return self.groups[g].max_num_blocks
        return int(self._blocks(g, self._limit).max())


def group_is_paged(group: KVCacheGroup) -> bool:
    """Whether a group's rows grow with their tokens."""
    return group.maps_slots and not group.circular


SIX = (16, 16, 32, 64, 128, 256)
EIGHT = (16, 16, 32, 32, 64, 64, 128, 256)
FOUR = (16, 32, 64, 128)

MEASURED = (
    "decode 256x6",
    "decode 1024x8",
    "decode 8x4",
    "prefill 1x8192x6",
    "mixed 250+4000+3000",
    "spec 128x4",
    "decode 64x12",
)
"""The workloads that figures are reported for; requests x groups, block sizes 16 to 256."""

SMALL = ("decode", "mixed", "long prefill", "speculative", "context parallel", "many groups")
"""One workload of each shape, small enough for the scalar reference."""


def workload(name: str, context: int | None = None, seed: int = 0) -> Workload:
    """A workload of `MEASURED` or `SMALL`.

    Args:
        name: which one.
        context: tokens a decoding request has computed before its first step, up to a million;
            a prefill begins there as well when it is given.
        seed: see `Workload`.
    """
    rng = np.random.default_rng(seed + 1)

    def jitter(count: int, default: int) -> list[int]:
        """Contexts just below the nominal one, so that blocks do not fill in the same step."""
        nominal = default if context is None else context
        below: list[int] = rng.integers(0, min(256, nominal + 1), count).tolist()
        return [nominal - tokens for tokens in below]

    def make(
        sizes: Sequence[int],
        lens: list[int],
        contexts: list[int],
        max_num_reqs: int,
        capacity: int,
        **settings: Any,
    ) -> Workload:
        longest = max(contexts) + max(HEADROOM, 2 * max(lens))
        groups = [KVCacheGroup(size, -(-longest // size)) for size in sizes]
        return Workload(
            name, tuple(groups), lens, contexts, max_num_reqs, capacity, seed=seed, **settings
        )

    start = context or 0
    if name == "decode 256x6":
        return make(SIX, [1] * 256, jitter(256, 8192), 256, 8192)
    if name == "decode 1024x8":
        return make(EIGHT, [1] * 1024, jitter(1024, 4096), 1024, 16384)
    if name == "decode 8x4":
        return make(FOUR, [1] * 8, jitter(8, 8192), 8, 8192)
    if name == "prefill 1x8192x6":
        return make(SIX, [8192], [start], 8, 8192)
    if name == "mixed 250+4000+3000":
        contexts = [*jitter(250, 8192), start, start]
        return make(SIX, [1] * 250 + [4000, 3000], contexts, 256, 8192)
    if name == "spec 128x4":
        return make(SIX, [4] * 128, jitter(128, 8192), 128, 8192, speculative=True)
    if name == "decode 64x12":
        return make(SIX * 2, [1] * 64, jitter(64, 8192), 64, 65536)
    if name == "decode":
        return make(FOUR, [1] * 12, jitter(12, 300), 16, 32)
    if name == "mixed":
        return make(FOUR, [1] * 6 + [50, 33], [*jitter(6, 300), start, start], 8, 96)
    if name == "long prefill":
        return make(FOUR, [500], [start], 2, 512)
    if name == "speculative":
        return make(FOUR, [4] * 8, jitter(8, 300), 8, 40, speculative=True)
    if name == "context parallel":
        cp = ContextParallel(size=4, rank=1, interleave=8)
        return make(FOUR, [1] * 6 + [40], jitter(7, 300), 8, 64, context_parallel=cp)
    if name == "many groups":
        nominal = 300 if context is None else context
        load = make((16,), [1] * 5 + [20], jitter(6, 300), 8, 32)
        return Workload(
            name, every_kind(nominal + HEADROOM), load.query_lens, load.contexts, 8, 32, seed=seed
        )
    raise KeyError(f"no workload {name!r}; there are {MEASURED + SMALL}")


def every_kind(max_model_len: int) -> tuple[KVCacheGroup, ...]:
    """Sixteen groups: paged, split, odd, sliding, state and ring."""
    paged = [
        KVCacheGroup(size, -(-max_model_len // size), kernel_size, sliding_window_reach=reach)
        for size, kernel_size, reach in (
            (16, 16, 0), (32, 16, 0), (64, 32, 1023), (128, 128, 100), (640, 128, 0),
            (48, 48, 0), (12, 4, 17), (1, 1, 0), (256, 64, 0), (16, 8, 64),
        )
    ]  # fmt: skip
    none = SlotMappingMode.NONE
    return (
        *paged,
        KVCacheGroup(max_model_len, 1, slot_mapping_mode=none),
        KVCacheGroup(max_model_len, 3, slot_mapping_mode=none, prefix_cacheable=False),
        KVCacheGroup(8, 1, circular=True, prefix_cacheable=False),
        KVCacheGroup(5, 1, circular=True, prefix_cacheable=False),
        KVCacheGroup(100, -(-max_model_len // 100), prefix_cacheable=False),
        KVCacheGroup(4, -(-max_model_len // 4), sliding_window_reach=1),
    )
