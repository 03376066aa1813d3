"""Flight recordings of context parallel ranks that serve the same requests, right and spoiled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode

GROUPS = [
    KVCacheGroup(8, 40, kernel_block_size=4, name="full"),
    KVCacheGroup(8, 40, dcp_sharded=False, name="replicated"),
    KVCacheGroup(64, 3, slot_mapping_mode=SlotMappingMode.NONE, name="state"),
    KVCacheGroup(8, 1, circular=True, name="ring"),
]
ROWS, TOKENS = 6, 48


class Rank:
    """A manager of one rank, and its calls, each of which a test may spoil."""

    def __init__(
        self, rank: int, size: int, groups: Sequence[KVCacheGroup] = GROUPS, interleave: int = 2
    ) -> None:
        self.rank = rank
        self.tables = AscendBlockTables.from_groups(
            groups,
            max_num_reqs=ROWS,
            max_num_batched_tokens=TOKENS,
            context_parallel=ContextParallel(size, rank, interleave),
        )

    def append(self, turn: int, row: int, ids: list[list[int]], overwrite: bool) -> None:
        self.tables.append_block_ids(row, tuple(ids), overwrite)

    def step(
        self, turn: int, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self.tables.step(rows, starts, positions, num_reqs_padded=len(rows))


def serve(rank: Rank, turns: int, record: Callable[[int], int] = lambda turn: 0) -> None:
    """Admit, decode and finish requests as a scheduler would, the same on every rank.

    Args:
        rank: who is told.
        turns: steps.
        record: calls to record from a turn on, 0 = go on as before.
    """
    chance = random.Random(7)
    size = rank.tables.cp_size
    lengths = dict[int, int]()
    held = dict[int, list[int]]()
    block = 0

    def new(count: int) -> list[int]:
        nonlocal block
        block += count
        return list(range(block - count + 1, block + 1))

    for turn in range(turns):
        if number := record(turn):
            rank.tables.start_recording(number)
        for row in [row for row, length in lengths.items() if length > 60]:
            del lengths[row]
        counts = {}
        for row in range(ROWS):
            if row in lengths:
                counts[row] = chance.choice([1, 1, 2])
            elif chance.random() < 0.4:
                counts[row], lengths[row], held[row] = chance.randint(3, 12), 0, [0, 0]
        batch = list(counts)
        chance.shuffle(batch)
        positions = []
        for row in batch:
            needed = [-(-(lengths[row] + counts[row]) // k) for k in (8 * size, 8)]
            more = [max(n - h, 0) for n, h in zip(needed, held[row], strict=True)]
            first = not lengths[row]
            if first or any(more):
                ids = [*map(new, more), *([new(1), new(1)] if first else [[], []])]
                rank.append(turn, row, ids, first)
            held[row] = needed
            positions += range(lengths[row], lengths[row] + counts[row])
            lengths[row] += counts[row]
        starts = np.cumsum([0, *(counts[row] for row in batch)])
        rank.step(
            turn,
            torch.tensor(batch, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
        )


def record_rank(
    folder: Path,
    rank: int,
    size: int = 4,
    *,
    turns: int = 70,
    begin: int = 0,
    num_calls: int = 20,
    cls: type[Rank] = Rank,
    built_as: int | None = None,
) -> str:
    """The file of a rank that serves so many steps, recorded from step `begin` on."""
    served = cls(rank if built_as is None else built_as, size)
    served.rank = rank
    serve(served, turns, lambda turn: num_calls if turn == begin else 0)
    return str(served.tables.save_recording(folder / f"rank{rank}.npz.xz"))
