"""Random engine lives that keep vLLM's contract, for two sets of v2 tables at once.

In contract: a token's column is filled, a request's row starts with an overwrite, query_start_loc
and num_reqs_padded fit the buffers. Where the two must agree they are compared bit for bit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

NUM_STEPS = 40
"""Steps of one life."""


@dataclass(frozen=True)
class Group:
    """One KV cache group; blocks of a request cover positions 0 ... max_len - 1."""

    block_size: int
    width: int
    enabled: bool
    sharded: bool
    reach: int


@dataclass
class Request:
    row: int
    target: int
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Life:
    """One configuration, and the requests that come and go."""

    def __init__(self, seed: int) -> None:
        self.random = rng = Random(seed)
        self.max_num_reqs = rng.randint(1, 5)
        self.capacity = rng.choice([16, 24, 33])
        self.max_len = rng.randint(8, 48)
        self.cp_size = rng.choice([1, 1, 1, 2, 3])
        self.cp_rank = rng.randrange(self.cp_size)
        self.interleave = rng.choice([1, 2, 4])
        self.groups = [self._group() for _ in range(rng.choice([1, 1, 2, 3, 4]))]
        self.live: list[Request] = []
        self.free_rows = list(range(self.max_num_reqs))
        self.computed = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        self.counts: Counter[str] = Counter()

    def _group(self) -> Group:
        rng = self.random
        sharded = rng.random() < 0.7
        block_size = self.interleave * rng.choice([1, 2, 3, 4])
        if rng.random() < 0.2:  # Mamba: one block for the whole request, and some to speculate
            return Group(self.max_len * self.interleave, rng.randint(1, 3), True, False, 0)
        tokens = block_size * (self.cp_size if sharded else 1)
        reach = rng.choice([0, 0, rng.randint(1, self.max_len)])
        width = -(-self.max_len // tokens) + rng.randint(0, 2)
        return Group(block_size, width, rng.random() < 0.85, sharded, reach)

    def build(self, table_class: Any) -> Any:
        """Tables of that class, with the keywords of vLLM's runner."""
        return table_class(
            block_sizes=[group.block_size for group in self.groups],
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.capacity,
            max_num_blocks_per_group=[group.width for group in self.groups],
            device=torch.device("cpu"),
            slot_mapping_enabled=[group.enabled for group in self.groups],
            dcp_sharded=[group.sharded for group in self.groups],
            sliding_window_reach=[group.reach for group in self.groups],
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
            cp_interleave=self.interleave,
        )

    def blocks_for(self, group: Group, num_tokens: int) -> int:
        """Blocks that hold a request's first tokens."""
        return -(-num_tokens // (group.block_size * (self.cp_size if group.sharded else 1)))

    def schedule(self, appends: list[tuple[int, Any, bool]]) -> list[tuple[Request, int]]:
        """Requests of one step with their token counts; `appends` gets the new blocks."""
        rng = self.random
        for request in list(self.live):
            if request.computed >= request.target or rng.random() < 0.08:
                self.live.remove(request)
                self.free_rows.append(request.row)
                self.counts["finished or preempted"] += 1
        while self.free_rows and rng.random() < 0.7:
            self._admit()
        rng.shuffle(self.live)
        scheduled, budget = [], self.capacity
        for request in self.live:
            count = min(rng.choice([1, 1, 2, rng.randint(1, 12)]), budget)
            count = min(count, request.target - request.computed)
            if not count or rng.random() < 0.1:
                continue
            if request.blocks and rng.random() < 0.1 and request.computed:
                request.computed -= 1  # a rejected draft token
                self.counts["rejected"] += 1
            self._grow(request, request.computed + count, appends)
            scheduled.append((request, count))
            budget -= count
        return scheduled

    def _admit(self) -> None:
        rng = self.random
        row = self.free_rows.pop(rng.randrange(len(self.free_rows)))
        request = Request(row, rng.randint(1, self.max_len))
        if rng.random() < 0.3:  # a prefix hit
            request.computed = rng.randrange(request.target)
            self.counts["prefix hit"] += request.computed > 0
        self.live.append(request)

    def _block_id(self) -> int:
        return self.random.randint(1, 1 << self.random.choice([6, 20, 30]))

    def _grow(
        self, request: Request, num_tokens: int, appends: list[tuple[int, Any, bool]]
    ) -> None:
        rng, fresh = self.random, not request.blocks
        if fresh:
            request.blocks = [[] for _ in self.groups]
        new = []
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            missing = max(self.blocks_for(group, num_tokens) - len(blocks), 0)
            spare = int(len(blocks) + missing < group.width and rng.random() < 0.1)
            last_id = (2**31 - 1) // group.block_size - 1  # vLLM's kernel multiplies in int32
            new.append([min(self._block_id(), last_id) for _ in range(missing + spare)])
            blocks += new[-1]
        if fresh or any(new):
            appends.append((request.row, tuple(new), fresh))


@dataclass
class Batch:
    """The tensors that the runner passes for one step."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_reqs_padded: int
    num_tokens_padded: int
    computed: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[len(self.idx_mapping)])


def make_batch(life: Life, scheduled: list[tuple[Request, int]]) -> Batch:
    """These requests as a batch: full-length arrays, padding, dummies, either index type."""
    rng = life.random
    entries = [(request.row, request.computed, count) for request, count in scheduled]
    num_tokens = sum(count for *_, count in entries)
    if len(entries) < life.max_num_reqs and num_tokens < life.capacity and rng.random() < 0.2:
        entries.insert(rng.randint(0, len(entries)), (-1, 0, rng.randint(0, 1)))
    starts = [0]
    positions: list[int] = []
    for _, computed, count in entries:
        positions += range(computed, computed + count)
        starts.append(len(positions))
    for request, _ in scheduled:
        life.computed[request.row] = request.computed
    tail = rng.choice([0, 3])
    return Batch(
        torch.tensor([row for row, *_ in entries], dtype=rng.choice([torch.int32, torch.int64])),
        torch.tensor(starts + [starts[-1]] * tail, dtype=torch.int32),
        torch.tensor(positions + [rng.randrange(9) for _ in range(tail)], dtype=torch.int64),
        rng.randint(len(entries), life.max_num_reqs),
        rng.randint(len(positions), life.capacity),
        life.computed if rng.random() < 0.7 else None,
    )
