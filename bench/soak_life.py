"""The life that a soak leads: an engine's requests, step after step, and what each step must show.

Requests arrive (some from a cached prefix, with tokens to replay), grow by chunks, single tokens or
drafts, are preempted, rewritten and finished; rows and blocks go from one to the next. The truth is
kept in plain lists here.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from bench.soak_plan import DRAFTS, JUNK, Append, Chunk, Fields, Step, Views, World

KINDS = ("step", "calls", "out", "dummy")
SHARES = (70, 15, 10, 5)
"""How often a step is one call, three calls, three calls into the caller's tables, a dummy run."""


class Life:
    """Plans steps of one world.

    Args:
        world: the manager's configuration.
        seed: everything follows from it.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, Random(seed)
        self.fields = Fields(world)
        groups, rows = range(len(world.groups)), range(world.num_rows)
        widths = [group.row_width for group in world.groups]
        self.first_column = [sum(widths[:g]) for g in groups]
        self.row_size = sum(widths)
        self.columns: list[list[list[int]]] = [[[] for _ in rows] for _ in groups]
        self.blocks: list[list[list[int]]] = [[[] for _ in rows] for _ in groups]
        self.lengths = np.zeros((world.num_rows + 1, len(world.groups)), dtype=np.int32)
        self.computed = [0] * world.num_rows
        self.prompt, self.target = list(self.computed), list(self.computed)
        self.replay_start, self.room = list(self.computed), list(self.computed)
        self.batch: list[int] = []
        self.free_rows = list(rows)
        self.pools = [
            self.rng.sample(range(1, count + 1), count)
            for count in (2 + world.num_rows * group.max_num_blocks for group in world.groups)
        ]
        self._appends: list[Append] = []
        self._changed: dict[tuple[int, int], int] = {}

    def plan(self, num_steps: int) -> Chunk:
        """The next steps."""
        chunk = Chunk(self.fields, num_steps)
        for place in range(num_steps):
            chunk.steps.append(self._plan_step(chunk, chunk.views(place)))
        return chunk

    def _plan_step(self, chunk: Chunk, to: Views) -> Step:
        rng = self.rng
        kind = rng.choices(KINDS, SHARES)[0]
        self._appends = []
        entries: list[tuple[int, int, int]] = []
        if kind != "dummy":
            self._move_requests()
            entries = list(self._entries())
        num_reqs, num_tokens = len(entries), sum(count for _, _, count in entries)
        with_computed, with_replay = rng.random() < 0.8, rng.random() < 0.8
        self._write_batch(to, entries, with_computed, with_replay)
        self._write_changes(chunk)
        to["int32"]["lengths"][:] = self.lengths.ravel()
        drafts = rng.randint(1, DRAFTS) if kind != "dummy" and rng.random() < 0.1 else 0
        if drafts:
            chunk.unknown_rows += self._write_drafts(to, drafts)
        self._advance(entries)
        return Step(
            kind,
            self._appends,
            num_reqs,
            rng.randint(num_reqs, self.world.num_rows),
            num_tokens,
            rng.randint(num_tokens, self.world.capacity),
            rng.random() < 0.5,
            with_computed,
            with_replay,
            drafts,
            len(chunk.cells),
        )

    def _move_requests(self) -> None:
        """Preempt, admit, rewrite and reorder."""
        rng, batch = self.rng, self.batch
        if batch and rng.random() < 0.02:
            self._release(rng.choice(batch))
        while self.free_rows and rng.random() < 0.3:
            self._admit()
        if batch and rng.random() < 0.02:
            self._rewrite(rng.choice(batch))
        if rng.random() < 0.2:
            rng.shuffle(batch)

    def _admit(self) -> None:
        rng = self.rng
        row = self.free_rows.pop(rng.randrange(len(self.free_rows)))
        self.target[row] = rng.randint(2, self.world.max_len)
        self.prompt[row] = rng.randint(1, self.target[row] - 1)
        hit = rng.random() < 0.3
        self.computed[row] = rng.randint(1, self.prompt[row]) if hit else 0
        self.replay_start[row] = self.computed[row] if rng.random() < 0.5 else 0
        ahead = min(self.computed[row] + rng.randint(0, 40), self.target[row])
        self._append(row, self._missing(row, ahead), True)
        self.batch.append(row)

    def _release(self, row: int) -> None:
        self.batch.remove(row)
        self.free_rows.append(row)
        for pool, blocks in zip(self.pools, self.blocks, strict=True):
            pool += blocks[row]
            blocks[row] = []

    def _rewrite(self, row: int) -> None:
        """Give a request other blocks, as many as it had, and its row anew."""
        counts = [len(blocks[row]) for blocks in self.blocks]
        for pool, blocks in zip(self.pools, self.blocks, strict=True):
            pool[:0] = blocks[row]
            blocks[row] = []
        ids = [self._take(g, count) for g, count in enumerate(counts)]
        self._append(row, ids, True)

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        """Row, first position and number of tokens of each batch entry; blocks are appended."""
        rng, budget = self.rng, self.world.capacity
        for row in self.batch:
            computed = self.computed[row]
            most = 24 if computed < self.prompt[row] else rng.choice((1, 1, 1, 4))
            count = min(rng.randint(1, most), self.target[row] - computed, budget)
            if rng.random() < 0.01:
                count = 0
            budget -= count
            if rng.random() > 0.003:
                self._grow(row, computed + count)
            yield row, computed, count
        for _ in range(self.world.num_rows - len(self.batch)):
            if rng.random() < 0.05:
                count = min(rng.randint(0, 3), budget)
                budget -= count
                yield -1, rng.randint(0, 9), count

    def _grow(self, row: int, num_tokens: int) -> None:
        if num_tokens <= self.room[row]:
            return
        ids = self._missing(row, num_tokens)
        if self.rng.random() < 0.1:
            self._append(row, [list(some[:1]) for some in ids], False)
            ids = [some[1:] for some in ids]
        self._append(row, ids, False)

    def _missing(self, row: int, num_tokens: int) -> list[list[int]]:
        """Blocks that a request lacks to hold so many tokens."""
        missing = []
        for g, group in enumerate(self.world.groups):
            held = len(self.blocks[g][row])
            if group.circular:
                count = int(num_tokens > 0) - held
            elif not group.maps_slots:
                count = 0 if held else self.rng.randint(1, group.max_num_blocks)
            else:
                count = max(-(-num_tokens // self.world.tokens_per_block(g)) - held, 0)
            missing.append(self._take(g, count))
        return missing

    def _take(self, g: int, count: int) -> list[int]:
        pool = self.pools[g]
        return [pool.pop() for _ in range(count)]

    def _append(self, row: int, ids: list[list[int]], overwrite: bool) -> None:
        self._appends.append((row, ids, overwrite))
        for g, group in enumerate(self.world.groups):
            columns, n = self.columns[g][row], group.columns_per_block
            if overwrite:
                columns.clear()
            begin = self._changed.get((row, g), len(columns))
            self._changed[row, g] = min(begin, len(columns))
            columns += [block * n + part for block in ids[g] for part in range(n)]
            self.blocks[g][row] += ids[g]
            self.lengths[row, g] = len(columns)
        self.room[row] = min(
            len(blocks[row]) * self.world.tokens_per_block(g)
            for g, blocks in enumerate(self.blocks)
        )

    def _write_changes(self, chunk: Chunk) -> None:
        for (row, g), begin in self._changed.items():
            columns = self.columns[g][row]
            first = row * self.row_size + self.first_column[g]
            chunk.cells += range(first + begin, first + len(columns))
            chunk.values += columns[begin:]
        self._changed.clear()

    def _write_batch(
        self,
        to: Views,
        entries: list[tuple[int, int, int]],
        with_computed: bool,
        with_replay: bool,
    ) -> None:
        """The step's arguments and the oracle's view of them; JUNK where nothing may read."""
        world, wide, narrow, mask = self.world, to["int64"], to["int32"], to["bool"]
        num_reqs = len(entries)
        rows = np.array([row for row, _, _ in entries], dtype=np.int64)
        counts = np.array([count for _, _, count in entries], dtype=np.int64)
        firsts = np.array([first for _, first, _ in entries], dtype=np.int64)
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1]) if num_reqs else 0
        wide["idx"][:num_reqs] = narrow["idx"][:num_reqs] = rows
        narrow["starts"][:] = JUNK
        narrow["starts"][0], narrow["starts"][1 : num_reqs + 1] = 0, ends
        wide["positions"][:] = JUNK
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) - np.repeat(ends - counts - firsts, counts)
        wide["positions"][:num_tokens] = positions
        narrow["computed"][:] = self.computed
        replay = [self.replay_start[row] if row >= 0 else 0 for row in rows.tolist()]
        narrow["replay"][:num_reqs] = replay
        wanted = token_rows >= 0
        mask["wanted"][:num_tokens] = mask["not_replayed"][:num_tokens] = wanted
        if with_replay:
            since = positions - np.repeat(np.array(replay, dtype=np.int64), counts)
            begun = np.repeat(np.array(replay, dtype=np.int64) != 0, counts)
            replayed = begun & (since >= 0) & (since < world.replay_window)
            mask["not_replayed"][:num_tokens] &= ~replayed
        wide["token_rows"][:num_tokens] = np.where(wanted, token_rows, world.num_rows)
        wide["token_positions"][:num_tokens] = np.where(wanted, positions, 0)
        wide["entry_rows"][:] = world.num_rows
        wide["entry_rows"][:num_reqs] = np.where(rows >= 0, rows, world.num_rows)
        if with_computed:
            live = [self.computed[row] if row >= 0 else 0 for row in rows.tolist()]
            wide["entry_computed"][:num_reqs] = live

    def _write_drafts(self, to: Views, count: int) -> int:
        """Drafts: tokens ahead of their requests, a few of no request; returns unknown rows."""
        world, rng, wide = self.world, self.rng, to["int64"]
        choices = [*self.batch, -1] + [world.num_rows] * (rng.random() < 0.1)
        rows = [rng.choice(choices) for _ in range(count)]
        known = [0 <= row < world.num_rows for row in rows]
        ahead = [
            min(self.computed[row] + rng.randint(0, 30), world.max_len - 1) if live else 3
            for row, live in zip(rows, known, strict=True)
        ]
        wide["draft_rows"][:count], wide["draft_positions"][:count] = rows, ahead
        wide["token_drafts"][:] = world.num_rows
        wide["token_drafts"][:count] = np.where(known, rows, world.num_rows)
        wide["token_draft_positions"][:count] = np.where(known, ahead, 0)
        to["bool"]["wanted_drafts"][:count] = known
        return rows.count(world.num_rows)

    def _advance(self, entries: list[tuple[int, int, int]]) -> None:
        """Accept what was computed; finished requests leave."""
        for row, computed, count in entries:
            if row < 0:
                continue
            drafted = computed >= self.prompt[row] and count > 1
            self.computed[row] += self.rng.randint(1, count) if drafted else count
            if self.computed[row] >= self.target[row]:
                self._release(row)
