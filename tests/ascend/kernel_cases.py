"""Random batches for the package's own kernels, and what the scalar oracle says of them.

A `Setup` is a manager's configuration that selects one compiled variant; `random_batch` draws from
every kind of batch that a step can bring, edges included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode, reference
from fused_slots.reference import Outcome

NUM_ROWS = 24
CAPACITY = 640
_FAULTS = {
    Outcome.COLUMN_OUT_OF_ROW: "COLUMN_OUT_OF_ROW",
    Outcome.EMPTY_RING: "EMPTY_RING",
    Outcome.ROW_OUT_OF_RANGE: "ROW_OUT_OF_RANGE",
    Outcome.NULL_BLOCK: "NULL_BLOCK",
}


@dataclass(frozen=True)
class Setup:
    """One configuration: groups, context parallelism and dtypes."""

    groups: tuple[KVCacheGroup, ...]
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    slot_dtype: torch.dtype = torch.int32
    index_dtype: torch.dtype = torch.int32
    replay_window: int = 0
    null_block_id: int | None = None
    num_rows: int = NUM_ROWS
    capacity: int = CAPACITY

    def make(self) -> AscendBlockTables:
        return AscendBlockTables.from_groups(
            list(self.groups),
            max_num_reqs=self.num_rows,
            max_num_batched_tokens=self.capacity,
            context_parallel=self.context_parallel,
            slot_dtype=self.slot_dtype,
            replay_window=self.replay_window,
            null_block_id=self.null_block_id,
            num_blocks=[2**24 // group.block_size for group in self.groups],
        )


STATE = KVCacheGroup(block_size=4096, max_num_blocks=1, slot_mapping_mode=SlotMappingMode.NONE)
RING = KVCacheGroup(block_size=8, max_num_blocks=1, circular=True, prefix_cacheable=False)
POWERS = (
    KVCacheGroup(block_size=16, max_num_blocks=128),
    KVCacheGroup(block_size=128, max_num_blocks=16, kernel_block_size=32, prefix_cacheable=False,
                 sliding_window_reach=70),
    STATE,
)  # fmt: skip
OTHERS = (
    KVCacheGroup(block_size=48, max_num_blocks=64, sliding_window_reach=130),
    KVCacheGroup(block_size=640, max_num_blocks=8, kernel_block_size=128, prefix_cacheable=False),
    STATE,
)
LONG = (
    KVCacheGroup(block_size=128, max_num_blocks=131072),
    KVCacheGroup(block_size=144, max_num_blocks=131072),
)
SECOND_OF_TWO = ContextParallel(size=2, rank=1, interleave=4)
FIRST_OF_THREE = ContextParallel(size=3, rank=0, interleave=16)

SETUPS: dict[str, Setup] = {
    "powers": Setup((*POWERS, RING)),
    "powers_int64": Setup(
        (*POWERS, RING), slot_dtype=torch.int64, index_dtype=torch.int64
    ),
    "replay": Setup((*POWERS, RING), replay_window=40),
    "other_sizes": Setup(OTHERS),
    "sharded": Setup(POWERS, SECOND_OF_TWO),
    "sharded_other_sizes": Setup(OTHERS, FIRST_OF_THREE),
    "long_rows": Setup(LONG, slot_dtype=torch.int64),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A batch as arrays, the rows behind it, and its kind for messages."""

    kind: str
    rows: list[dict[int, list[int]]]  # per group: the filled columns of each row
    idx_mapping: np.ndarray
    query_start_loc: np.ndarray
    positions: np.ndarray
    replay_start: np.ndarray | None
    replay_len: np.ndarray | None = None


def fill_rows(
    tables: AscendBlockTables, setup: Setup, rng: np.random.Generator
) -> list[dict[int, list[int]]]:
    """Gives every row a random number of blocks; the filled columns by group and row."""
    filled: list[dict[int, list[int]]] = [{} for _ in setup.groups]
    for row in range(NUM_ROWS):
        blocks = []
        for g, group in enumerate(setup.groups):
            most = group.max_num_blocks
            count = int(rng.choice([0, 1, most - 1, most, int(rng.integers(0, most + 1))]))
            if most > 1000 and row % 8:
                count = int(rng.integers(0, 5))
            limit = 2**24 // group.block_size - 1
            ids = with_nulls(setup, rng.integers(0, limit, max(count, 0)), rng)
            columns = group.columns_per_block
            filled[g][row] = [i * columns + c for i in ids for c in range(columns)]
            blocks.append(ids)
        tables.append_block_ids(row, tuple(blocks), overwrite=True)
    tables.apply_staged_writes()
    return filled


def with_nulls(setup: Setup, ids: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Block ids, some of them the null block's, where the manager has one."""
    if setup.null_block_id is not None:
        ids[rng.random(len(ids)) < rng.choice([0.0, 0.1, 1.0])] = setup.null_block_id
    return ids.tolist()


def random_batch(setup: Setup, rows: list[dict[int, list[int]]], rng: np.random.Generator) -> Batch:
    """One batch of a random kind."""
    kind = str(rng.choice(list(_KINDS)))
    lengths = np.minimum(_KINDS[kind](rng, setup.capacity), setup.capacity)
    while lengths.sum() > setup.capacity and kind != "too_many":
        lengths = lengths[:-1]
    num_reqs = len(lengths)
    index = rng.permutation(NUM_ROWS)[:num_reqs] if num_reqs <= NUM_ROWS else (
        rng.integers(0, NUM_ROWS, num_reqs)
    )  # fmt: skip
    if rng.random() < 0.5 and num_reqs:
        index[rng.integers(0, num_reqs)] = -1
    if rng.random() < 0.2 and num_reqs:
        index[rng.integers(0, num_reqs)] = NUM_ROWS + int(rng.integers(0, 2))
    # Tokens before the first entry, should there be some, are nobody's.
    begin = int(rng.choice([0, 0, 0, 0, 1, 40])) if lengths.sum() + 40 < setup.capacity else 0
    starts = np.concatenate([[begin], begin + np.cumsum(lengths)]).astype(np.int32)
    reach = max(
        len(row) * (group.kernel_block_size or group.block_size)
        for group, of_group in zip(setup.groups, rows, strict=True)
        for row in of_group.values()
    )
    first = rng.integers(0, reach + 40, num_reqs)
    position = np.concatenate(
        [np.arange(begin), *(f + np.arange(n) for f, n in zip(first, lengths, strict=True))]
    ).astype(np.int64)
    _disturb(position, reach, rng)
    replay, lengths_given = None, None
    if setup.replay_window:
        replay = np.where(rng.random(num_reqs) < 0.5, rng.integers(0, reach + 1, num_reqs), 0)
        if rng.random() < 0.2:
            replay = rng.choice([-(2**31), -1, 1, 2**31 - 41, 2**31 - 8, 2**31 - 1], num_reqs)
        if rng.random() < 0.5:
            edges = [-(2**31), -1, 0, 1, 40, 2**31 - 1]
            some, usual = rng.random(num_reqs) < 0.5, rng.integers(0, 90, num_reqs)
            lengths_given = np.where(some, usual, rng.choice(edges, num_reqs)).astype(np.int32)
        replay = replay.astype(np.int32)
    return Batch(kind, rows, index, starts, position, replay, lengths_given)


_KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "decode": lambda rng, capacity: np.ones(int(rng.integers(1, 25)), int),
    "speculative": lambda rng, capacity: np.full(int(rng.integers(1, 25)), int(rng.integers(2, 6))),
    "prefill": lambda rng, capacity: rng.integers(1, capacity + 1, 1),
    "mixed": lambda rng, capacity: np.append(np.ones(int(rng.integers(1, 20)), int),
                                             rng.integers(1, 400, 2)),
    "ragged": lambda rng, capacity: rng.integers(0, 60, int(rng.integers(1, 25))),
    "with_empty": lambda rng, capacity: rng.choice([0, 0, 2, 3], int(rng.integers(1, 25))),
    "no_tokens": lambda rng, capacity: np.zeros(int(rng.integers(1, 5)), int),
    "full": lambda rng, capacity: np.array([capacity - 32, 31, 1]),
    "tile_edges": lambda rng, capacity: (
        np.array([capacity // 2 - 1, 1, 1, 256]) + rng.integers(-1, 2, 4)
    ),
}  # fmt: skip


def _disturb(position: np.ndarray, reach: int, rng: np.random.Generator) -> None:
    """Negative, scattered and extreme positions in some batches, and runs far from the rest."""
    if len(position) == 0:
        return
    some = rng.random(len(position)) < rng.choice([0.0, 0.0, 0.1, 1.0])
    how = rng.integers(0, 4)
    if how == 0:
        position[some] = rng.integers(0, reach + 40, int(some.sum()))
    elif how == 1:
        position[some] = -rng.integers(1, 2**40, int(some.sum()))
    elif how == 2:
        if rng.random() < 0.5:
            position += rng.choice(np.array([2**24 - 99, 2**31 - 300, 2**32, -(2**32), 2**40]))
    else:
        edges = [2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 300, 2**32 - 3,
                 2**32, 2**32 + 3, 2**32 + 2**31 - 8, 2**40]  # fmt: skip
        position[some] = rng.choice(np.array(edges), int(some.sum()))


def expected(
    setup: Setup, batch: Batch, view: int | None = None
) -> tuple[np.ndarray, Counter[tuple[str, int]]]:
    """The oracle's slots [G, capacity] and its faults by (code, group).

    view: tokens that the caller says it expects; None = as many as come.
    """
    arguments = [batch.idx_mapping.tolist(), batch.query_start_loc.tolist(),
                 batch.positions.tolist()]  # fmt: skip
    replay = None if batch.replay_start is None else batch.replay_start.tolist()
    lengths = None if batch.replay_len is None else batch.replay_len.tolist()
    slots = reference.slot_mappings(
        setup.groups, batch.rows, *arguments, setup.capacity, setup.context_parallel, replay,
        setup.replay_window, lengths, setup.null_block_id,
    )  # fmt: skip
    faults: Counter[tuple[str, int]] = Counter()
    if view is not None and batch.query_start_loc[-1] > view:
        faults.update(("TOKENS_OVER_VIEW", g) for g in range(len(setup.groups)))
    for b, row in enumerate(arguments[0]):
        for token in range(batch.query_start_loc[b], batch.query_start_loc[b + 1]):
            for g, group in enumerate(setup.groups):
                if row < 0:
                    continue
                outcome = reference.map_token(
                    group, batch.rows[g].get(row), arguments[2][token], setup.context_parallel,
                    replay[b] if replay else 0, setup.replay_window,
                    lengths[b] if lengths else None, setup.null_block_id,
                ).outcome  # fmt: skip
                if outcome in _FAULTS:
                    faults[_FAULTS[outcome], g] += 1
    return np.array(slots, np.int64), faults
