"""Our v2 tables against vLLM's own kernels: gathered tables and slots, bit for bit.

pytest tests/vllm/test_v2_against_vllm.py          1,000 random steps
pytest tests/vllm/test_v2_against_vllm.py --long  10,000
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from fused_slots.vllm.v2 import FusedBlockTables
from tests.vllm.lockstep import NUM_STEPS, Batch, Life, make_batch


class Pair:
    """vLLM's tables and ours, given the same calls."""

    def __init__(self, life: Life, ours: Any) -> None:
        self.life, self.ours, self.theirs = life, ours, life.build(BlockTables)
        self.compared: Counter[str] = Counter()

    def stage(self, appends: list[tuple[int, Any, bool]]) -> None:
        for row, ids, overwrite in appends:
            for tables in (self.ours, self.theirs):
                tables.append_block_ids(row, ids, overwrite=overwrite)

    def step(self, batch: Batch, launches: int) -> None:
        """One step as the runner makes it, in ours in that many launches.

        1: as the plugin wraps the runner; 2: the three calls one by one, as where the runner's
        `prepare_attn` is not wrapped; 3: where nothing is.
        """
        before, pending = self.ours.launches, self.ours._rows.pending
        with ExitStack() as wrapped:
            if launches < 3:
                wrapped.enter_context(self.ours.defer_writes())
            self.ours.apply_staged_writes()
            if launches < 2:
                wrapped.enter_context(self.ours.fuse_gather())
            tables, slots = self._gather_and_map(self.ours, batch)
        assert self.ours.launches - before == (launches if pending else min(launches, 2))
        self.theirs.apply_staged_writes()
        if -1 in batch.idx_mapping:
            # A captured draft has dummies, and never gathers them; vLLM's gather would read row -1.
            their_tables = None
            their_slots = self._map(self.theirs, batch)
        else:
            their_tables, their_slots = self._gather_and_map(self.theirs, batch)
        self._compare_slots(batch, slots, their_slots)
        if their_tables is not None:
            self._compare_tables(batch, tables, their_tables)

    def _gather_and_map(self, tables: Any, batch: Batch) -> tuple[Any, torch.Tensor]:
        gathered = tables.gather_block_tables(
            batch.idx_mapping,
            num_reqs_padded=batch.num_reqs_padded,
            num_computed_tokens=batch.computed,
        )
        return gathered, self._map(tables, batch)

    def _map(self, tables: Any, batch: Batch) -> torch.Tensor:
        return tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_padded,
        )

    def _compare_slots(self, batch: Batch, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.dtype == theirs.dtype == torch.int64
        assert ours.shape == theirs.shape == (len(self.life.groups), batch.num_tokens_padded)
        assert torch.equal(self.ours.slot_mappings, self.theirs.slot_mappings)
        self.compared["slots"] += len(self.life.groups) * batch.num_tokens
        self.compared["steps"] += 1

    def _compare_tables(self, batch: Batch, ours: Any, theirs: Any) -> None:
        """Filled columns and padding rows; vLLM leaves what lies beyond a row's columns."""
        num_reqs = len(batch.idx_mapping)
        for g, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.shape == their.shape
            assert mine.dtype == their.dtype == torch.int32
            filled = self.theirs.num_blocks.np[g]
            for b, row in enumerate(batch.idx_mapping.tolist()):
                assert torch.equal(mine[b, : filled[row]], their[b, : filled[row]])
                assert not mine[b, filled[row] :].any()
                self.compared["cells"] += int(filled[row])
            assert not mine[num_reqs:].any()
            assert not their[num_reqs:].any()

    def out_calls(self, batch: Batch) -> None:
        """As PCP and standalone drafts call them: tables and slots of the caller's own."""
        rows = 2 * self.life.max_num_reqs
        repeated = torch.cat([batch.idx_mapping, batch.idx_mapping])
        results = []
        for tables in (self.ours, self.theirs):
            out = tuple(
                torch.zeros(rows, t.shape[1], dtype=torch.int32) for t in tables.input_block_tables
            )
            pointers = torch.tensor([table.data_ptr() for table in out], dtype=torch.uint64)
            if -1 not in batch.idx_mapping:
                tables.gather_block_tables(
                    repeated, min(len(repeated) + 1, rows), out=out, out_ptrs=pointers
                )
            slots = torch.full((len(self.life.groups), self.life.capacity + 7), 5)
            view = tables.compute_slot_mappings(
                batch.idx_mapping,
                batch.query_start_loc,
                batch.positions,
                batch.num_tokens,
                out=slots,
            )
            assert view.shape == (len(self.life.groups), batch.num_tokens)
            results.append((out, slots))
        (our_tables, our_slots), (their_tables, their_slots) = results
        assert torch.equal(our_slots, their_slots)
        assert all(map(torch.equal, our_tables, their_tables))

    def dummy_run(self) -> None:
        """Graph capture and profiling: zeroed rows, PAD slots, and a caller who writes rows."""
        count = self.life.random.randint(0, self.life.max_num_reqs)
        for tables in (self.ours, self.theirs):
            for table in tables.get_dummy_block_tables(count):
                assert table.shape[0] == count
                assert not table.any()
                table[:, 0] = 9
            assert (tables.get_dummy_slot_mappings(3)[:, :3] == -1).all()
            assert (tables.slot_mappings == -1).all()


def live(pair: Pair, launches: int, num_steps: int = NUM_STEPS) -> None:
    """One life of random steps."""
    life = pair.life
    while pair.compared["steps"] < num_steps:
        appends: list[tuple[int, Any, bool]] = []
        scheduled = life.schedule(appends)
        pair.stage(appends)
        batch = make_batch(life, scheduled)
        pair.step(batch, launches)
        if life.random.random() < 0.1:
            pair.out_calls(batch)
        if life.random.random() < 0.05:
            pair.dummy_run()
        for request, count in scheduled:
            request.computed += count


def test_random_steps_agree_with_vllm(num_lives: int) -> None:
    compared: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(num_lives):
        life = Life(seed)
        pair = Pair(life, life.build(FusedBlockTables))
        try:
            live(pair, launches=1 + seed % 3)
        except Exception as error:
            raise AssertionError(f"life {seed}, step {pair.compared['steps']}") from error
        compared += pair.compared
        happened += life.counts
    assert compared["steps"] == num_lives * NUM_STEPS
    assert min(happened[name] for name in ("finished or preempted", "prefix hit", "rejected")) > 99
    assert compared["slots"] > 100 * num_lives
    assert compared["cells"] > 100 * num_lives
    print(f"\n{compared['steps']} steps: {dict(compared)}, {dict(happened)}")


@pytest.mark.parametrize(("seed", "launches"), [(1001, 1), (1002, 1), (1003, 2)])
def test_the_triton_kernels_agree_with_vllms(
    seed: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of the accelerators, in the interpreter."""
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "interpreter")
    life = Life(seed)
    pair = Pair(life, life.build(FusedBlockTables))
    assert pair.ours._backend.name == "interpreter"
    live(pair, launches, num_steps=15)
    assert pair.compared["slots"] > 50
