"""Steps that cross the borders between tiles, programs, chunks and records; sizes around each."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, plan, reference
from tests.backends_under_test import MakeTables, int32, int64

PAGED = KVCacheGroup(4, 300)
SPLIT = KVCacheGroup(12, 100, 6, prefix_cacheable=False, sliding_window_reach=7)
RING = KVCacheGroup(8, 1, circular=True, prefix_cacheable=False)


class Batch:
    """Random rows and a batch of given query lengths, mapped by the scalar reference too."""

    def __init__(
        self,
        tables: AscendBlockTables,
        query_lens: list[int],
        seed: int = 0,
        padded: int | None = None,
    ) -> None:
        self.rng = rng = Random(seed)
        self.tables = tables
        groups, num_rows = tables.layout.groups, tables.max_num_reqs
        self.rows: list[list[list[int]]] = [[[] for _ in range(num_rows)] for _ in groups]
        self.idx = [rng.randrange(-1, num_rows) for _ in query_lens]
        self.starts = [0]
        self.positions: list[int] = []
        self.replay = [rng.choice((0, rng.randrange(40))) for _ in query_lens]
        for length in query_lens:
            first = rng.randrange(0, 400)
            self.positions += range(first, first + length)
            self.starts.append(len(self.positions))
        self.padded = len(self.positions) if padded is None else padded

    def stage(self, rows: list[int]) -> None:
        """Start these rows anew."""
        for row in rows:
            ids = [
                self.rng.sample(range(1, 5000), self.rng.randint(0, min(group.max_num_blocks, 99)))
                if not group.circular
                else [self.rng.randrange(1, 5000)]
                for group in self.tables.layout.groups
            ]
            self.tables.append_block_ids(row, ids, overwrite=True)
            for g, group in enumerate(self.tables.layout.groups):
                n = group.columns_per_block
                self.rows[g][row] = [block * n + j for block in ids[g] for j in range(n)]

    def check(self, slots: torch.Tensor) -> None:
        layout = self.tables.layout
        expected = reference.slot_mappings(
            layout.groups,
            self.rows,
            self.idx,
            self.starts,
            self.positions,
            layout.max_num_batched_tokens,
            layout.context_parallel,
            self.replay if layout.replay_window else None,
            layout.replay_window,
        )
        whole = self.tables.slot_mappings.tolist()
        assert whole == expected
        assert slots.tolist() == [line[: slots.shape[1]] for line in whole]

    def map(self) -> None:
        tables = self.tables
        replay = int32(tables, self.replay) if tables.layout.replay_window else None
        self.check(
            tables.compute_slot_mappings(
                int32(tables, self.idx),
                int32(tables, self.starts),
                int64(tables, self.positions),
                self.padded,
                replay_start=replay,
            )
        )

    def step(self) -> None:
        tables = self.tables
        replay = int32(tables, self.replay) if tables.layout.replay_window else None
        gathered, slots = tables.step(
            int32(tables, self.idx),
            int32(tables, self.starts),
            int64(tables, self.positions),
            num_tokens_padded=self.padded,
            replay_start=replay,
        )
        self.check(slots)
        for g, table in enumerate(gathered):
            for b, row in enumerate(self.idx):
                columns = self.rows[g][row] if row >= 0 else []
                assert table[b].tolist() == columns + [0] * (table.shape[1] - len(columns))


TILE = plan.TILE
SHAPES = {
    "one tile": [TILE],
    "one tile and a token": [TILE + 1],
    "one tile less a token": [TILE - 1],
    "two tiles": [2 * TILE],
    "requests across a border": [TILE - 3, 7, 1, TILE - 6, 1, 1, 0, 2],
    "empty requests first and last": [0, 0, 3, 0, TILE, 0, 0],
    "equal queries": [9] * 31,
    "all but one equal": [9] * 30 + [10],
    "one long among short": [1] * 20 + [3 * TILE + 5] + [1] * 20,
    "mostly empty": [0] * 17 + [TILE + 2] + [0] * 16,
}


def make(make_tables: MakeTables, **settings: object) -> AscendBlockTables:
    sizes = {"max_num_reqs": 41, "max_num_batched_tokens": 1200, "replay_window": 6}
    return make_tables([PAGED, SPLIT, RING], **{**sizes, **settings})


@pytest.mark.parametrize("shape", SHAPES)
def test_token_tiles(make_tables: MakeTables, shape: str, plan: str) -> None:
    batch = Batch(make(make_tables), SHAPES[shape])
    batch.stage(list(range(41)))
    batch.step()
    batch.map()


@pytest.mark.parametrize("padded", [0, 1, TILE, 1200])
def test_other_token_counts_than_the_plan_was_made_for(
    make_tables: MakeTables, padded: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph replays with other contents: few programs map many tokens, and many few."""
    for lens in ([2 * TILE + 9, 300], [3, 1], []):
        tables = make(make_tables)
        monkeypatch.setattr(tables._backend, "reads_tensors_on_host", False)
        batch = Batch(tables, lens, padded=padded)
        batch.stage(list(range(41)))
        batch.step()
        batch.map()


@pytest.mark.parametrize("capacity", [TILE, TILE + 1, 2048 + TILE, 2048 + TILE + 1, 5000])
def test_padding_programs(make_tables: MakeTables, capacity: int, plan: str) -> None:
    tables = make(make_tables, max_num_batched_tokens=capacity)
    batch = Batch(tables, [3, 5, 1])
    batch.stage(list(range(41)))
    tables.slot_mappings.fill_(-77)
    batch.step()
    tables.slot_mappings.fill_(-77)
    batch.map()


@pytest.mark.parametrize("staged", [1, 7, 8, 9, 16, 41])
def test_records_and_batch_slots(make_tables: MakeTables, staged: int) -> None:
    batch = Batch(make(make_tables), [2] * 41)
    for _ in range(2):
        batch.stage(batch.rng.sample(range(41), staged))
        batch.step()
    batch.tables.apply_staged_writes()
    batch.stage(list(range(staged)))
    batch.tables.apply_staged_writes()
    batch.map()


def test_no_launch_has_more_programs_than_cuda_launches(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of a million tokens among many that grow; a grid's second axis ends at 65,535."""
    tables = make_tables([KVCacheGroup(8, 131_072)], max_num_reqs=512)
    backend, programs = tables._backend, []
    launch = lambda count, *_: programs.append(count)  # noqa: E731
    monkeypatch.setattr(backend, "_launch_of", lambda *_: launch)
    for row in range(512):
        tables.append_block_ids(row, [[1] * (131_072 if row == 0 else 1)], overwrite=True)
    idx, starts = int32(tables, range(512)), int32(tables, [0] * 513)
    tables.step(idx, starts, int64(tables, []))
    out = torch.empty((1, 9_000_000), dtype=torch.int32)
    tables.compute_slot_mappings(idx, starts, int64(tables, []), 9_000_000, out=out)
    assert len(programs) == 2
    assert max(programs) <= 65_535


def test_few_writers_share_long_records(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_WRITERS", 6)
    batch = Batch(make(make_tables), [2] * 41)
    for staged in (41, 9, 1):
        batch.stage(batch.rng.sample(range(41), staged))
        batch.step()
        batch.step()


@pytest.mark.parametrize("starts", [[-5, 3], [7, 2, 5, 1, 40], [0, 2**31 - 1, 4], [0, -1, 1500]])
def test_garbage_offsets_touch_nothing_else(
    make_tables: MakeTables, starts: list[int], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of a GPU does not see them; watched memory tells an access out of bounds."""
    tables = make(make_tables, max_num_batched_tokens=700)
    monkeypatch.setattr(tables._backend, "reads_tensors_on_host", False)
    idx, positions = int32(tables, range(len(starts) - 1)), int64(tables, range(700))
    out = torch.full((5, 700), -77, dtype=torch.int64)
    tables.step(idx, int32(tables, starts), positions)
    tables.compute_slot_mappings(idx, int32(tables, starts), positions, 700, out=out[1:4])
    assert set(out[[0, 4]].flatten().tolist()) == {-77}


def test_programs_share_the_columns_of_long_rows(make_tables: MakeTables) -> None:
    batch = Batch(make_tables([KVCacheGroup(4, 3000)], max_num_reqs=3), [2, 2, 1])
    for row, count in ((0, 3000), (1, 2047), (2, 1)):
        ids = list(range(row + 1, row + count + 1))
        batch.tables.append_block_ids(row, [ids], overwrite=True)
        batch.rows[0][row] = ids
    batch.step()
    batch.tables.append_block_ids(1, [[7] * 900], overwrite=False)
    batch.rows[0][1] += [7] * 900
    batch.step()


@pytest.mark.parametrize("rank", [0, 2])
def test_context_parallel_tiles(make_tables: MakeTables, rank: int, plan: str) -> None:
    tables = make_tables(
        [KVCacheGroup(12, 40, 6), KVCacheGroup(6, 90, dcp_sharded=False)],
        max_num_reqs=9,
        max_num_batched_tokens=700,
        context_parallel=ContextParallel(3, rank, 2),
    )
    batch = Batch(tables, [TILE + 1, 90, 1, 1, 0, 200])
    batch.stage(list(range(9)))
    batch.step()
    batch.map()


def test_more_faults_than_are_recorded_one_by_one(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], checked=True, max_num_batched_tokens=600)
    idx, starts = int32(tables, [0, 9]), int32(tables, [0, 500, 600])
    tables.compute_slot_mappings(idx, starts, int64(tables, range(600)), 600)
    faults = tables.take_faults()
    assert sum(fault.count for fault in faults) == 600
    places = {(f.row, f.token, f.position) for f in faults if f.token >= 0}
    assert len(places) == 64
    assert all(token == position and row == (0, 9)[token >= 500] for row, token, position in places)


@pytest.mark.parametrize("count", [1, TILE, TILE + 1, 600])
def test_drafts(make_tables: MakeTables, count: int) -> None:
    tables = make(make_tables)
    batch = Batch(tables, [1])
    batch.stage(list(range(41)))
    tables.apply_staged_writes()
    rng = batch.rng
    rows = [rng.randrange(41) for _ in range(count)]
    positions = [rng.randrange(600) for _ in range(count)]
    result = tables.map_tokens(int64(tables, rows), int64(tables, positions))
    for g, group in enumerate(tables.layout.groups):
        assert result[g].tolist() == [
            reference.map_token(group, batch.rows[g][row], position, ContextParallel(), 0, 0).slot
            for row, position in zip(rows, positions, strict=True)
        ]


@pytest.mark.parametrize("size", [4, 5])
def test_positions_beyond_int32(make_tables: MakeTables, size: int) -> None:
    """A ring wraps wherever it is; a row of pages ends, with a fault that the owner counts once."""
    ring = KVCacheGroup(size, 1, circular=True, prefix_cacheable=False)
    tables = make_tables([ring, PAGED], {0: [[7], [3]]})
    far = [2**31 - 1, 2**31, 2**31 + 2, 2**40 + 6, 2**62 + 1, -(2**63), 1]
    slots = tables.compute_slot_mappings(
        int32(tables, [0]), int32(tables, [0, len(far)]), int64(tables, far), len(far)
    )
    assert slots[0].tolist() == [7 * size + p % size if p >= 0 else -1 for p in far]
    assert slots[1].tolist() == [-1] * 6 + [13]
    assert [(fault.group, fault.count) for fault in tables.take_faults()] == [(1, 5)]
    shared = KVCacheGroup(6 * size, 4)
    for rank in range(3):
        tables = make_tables([shared], {0: [[3]]}, context_parallel=ContextParallel(3, rank, size))
        tables.map_tokens(int32(tables, [0] * len(far)), int64(tables, far))
        owned = [p for p in far[:5] if p // size % 3 == rank]
        assert sum(fault.count for fault in tables.take_faults()) == len(owned)


def test_row_numbers_beyond_int32(make_tables: MakeTables) -> None:
    """They do not wrap round to rows that exist."""
    tables = make_tables([PAGED], {0: [[3]], 1: [[5]]})
    far = [2**31, 2**32, 2**32 + 1, -(2**32), -(2**63), 2**63 - 1, 1]
    idx, starts = int64(tables, far), int32(tables, range(len(far) + 1))
    tables.map_tokens(idx, int64(tables, [1] * len(far)))
    gathered, slots = tables.step(idx[-4:], starts[:5], int64(tables, [1] * 4))
    assert slots[0].tolist()[:5] == [-1, -1, -1, 21, -1]
    assert gathered[0][:, 0].tolist() == [0, 0, 0, 5]
    # Four rows that are too large among the drafts, one in the step.
    assert [fault.count for fault in tables.take_faults()] == [5]
