"""One manager in a soak: each step goes through it and the oracle; differences are counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from bench.soak_life import Life
from bench.soak_oracle import PAD, Oracle
from bench.soak_plan import Chunk, Step, World
from fused_slots import AscendBlockTables
from fused_slots.faults import FaultCode

SENTINEL = 7_777_777
"""In the caller's tables before a call, and what a dummy run writes into the tables it is given."""

SYNCHRONISED = "called a synchronizing"
"""In torch's warning about an operation that waits for the GPU."""


class Mismatch(AssertionError):
    """A chunk of steps showed something else than the oracle."""


class Soaked:
    """One world's manager beside its oracle.

    Args:
        world: the configuration.
        seed: of its life.
        device: "cpu" or "cuda".
    """

    def __init__(self, world: World, seed: int, device: str) -> None:
        self.world, self.life = world, Life(world, seed)
        self.tables = AscendBlockTables.from_groups(
            world.groups,
            max_num_reqs=world.num_rows,
            max_num_batched_tokens=world.capacity,
            device=device,
            context_parallel=world.context_parallel,
            replay_window=world.replay_window,
        )
        self.tables.warmup()
        self.device = self.tables.device
        self.oracle = Oracle(world, self.device)
        self.out = [torch.empty_like(table) for table in self.tables.input_block_tables]
        # Two things wait for the device once: the first upload, which tries pinned memory out,
        # and the first gather into tables of the caller's, whose addresses are copied.
        self.tables.append_block_ids(0, [[] for _ in world.groups], overwrite=True)
        self.tables.apply_staged_writes()
        nobody = torch.zeros(0, dtype=torch.int32, device=self.device)
        self.tables.gather_block_tables(nobody, 1, self.out)
        shape = (len(world.groups), world.capacity)
        self.draft_out = torch.empty(shape, dtype=torch.int32, device=self.device)
        self.steps = self.compared = 0
        self.faults: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def run(self, num_steps: int) -> list[str]:
        """Take a chunk of steps, check it, and return where torch synchronised on the way.

        Raises:
            Mismatch: something differed; the message says where to look.
        """
        chunk = self.life.plan(num_steps)
        uploaded = {
            kind: torch.from_numpy(array).to(self.device) for kind, array in chunk.arrays.items()
        }
        cells = torch.tensor(chunk.cells, dtype=torch.int64).to(self.device)
        values = torch.tensor(chunk.values, dtype=torch.int32).to(self.device)
        counting = counted_synchronisations() if self.device.type == "cuda" else nullcontext([])
        with counting as synchronisations:
            written = 0
            for place, step in enumerate(chunk.steps):
                self.oracle.write(
                    cells[written : step.end_of_writes], values[written : step.end_of_writes]
                )
                written = step.end_of_writes
                self.take(step, Arrays(chunk, uploaded, place))
        self.kinds.update(step.kind for step in chunk.steps)
        self.steps += num_steps
        self.check(chunk)
        return [
            f"{warning.filename}:{warning.lineno}"
            for warning in synchronisations
            if SYNCHRONISED in str(warning.message)
        ]

    def take(self, step: Step, arrays: Arrays) -> None:
        """One step through the manager and the oracle."""
        tables, oracle, world = self.tables, self.oracle, self.world
        for row, ids, overwrite in step.appends:
            tables.append_block_ids(row, ids, overwrite)
        if step.kind == "dummy":
            self.take_dummy(step)
            return
        lengths = arrays.int32["lengths"].view(-1, len(world.groups))
        idx = (arrays.int64 if step.wide_index else arrays.int32)["idx"][: step.num_reqs]
        tokens = (idx, arrays.int32["starts"], arrays.int64["positions"])
        computed = arrays.int32["computed"] if step.with_computed else None
        replay = arrays.int32["replay"] if step.with_replay else None
        padded = step.num_reqs_padded
        cells = oracle.gathered(arrays.int64["entry_rows"], arrays.int64["entry_computed"], lengths)
        if step.kind == "step":
            tables.step(
                *tokens,
                num_reqs_padded=padded,
                num_tokens_padded=step.num_tokens_padded,
                num_computed_tokens=computed,
                replay_start=replay,
            )
        else:
            out = self.fresh_out() if step.kind == "out" else None
            tables.apply_staged_writes()
            tables.gather_block_tables(idx, padded, out, num_computed_tokens=computed)
            tables.compute_slot_mappings(*tokens, step.num_tokens_padded, replay_start=replay)
            if out is not None:
                whole = torch.cat(out, dim=1)
                oracle.compare_cells(whole[:padded], cells[:padded])
                oracle.compare_cells(whole[padded:], SENTINEL)
        if step.kind != "out":
            oracle.compare_cells(torch.cat(tables.input_block_tables, dim=1), cells)
        slots = oracle.slots(
            arrays.int64["token_rows"],
            arrays.int64["token_positions"],
            arrays.bool["wanted"],
            arrays.bool["not_replayed"],
            lengths,
        )
        oracle.compare_slots(tables.slot_mappings, slots)
        self.compared += cells.numel() + slots.numel()
        if step.num_drafts:
            self.take_drafts(step, arrays, lengths)

    def take_drafts(self, step: Step, arrays: Arrays, lengths: torch.Tensor) -> None:
        tables, oracle, count = self.tables, self.oracle, step.num_drafts
        expected = oracle.slots(
            arrays.int64["token_drafts"],
            arrays.int64["token_draft_positions"],
            arrays.bool["wanted_drafts"],
            arrays.bool["wanted_drafts"],
            lengths,
        )
        out = self.draft_out if step.wide_index else None
        rows, positions = arrays.int64["draft_rows"], arrays.int64["draft_positions"]
        slots = tables.map_tokens(rows[:count], positions[:count], out)
        oracle.compare_slots(slots, expected[:, :count])
        self.compared += slots.numel()
        if out is not None:
            oracle.compare_slots(out[:, count:], PAD)

    def take_dummy(self, step: Step) -> None:
        """A dummy run: zeros and padding; its model writes into what it was given."""
        given = self.tables.get_dummy_block_tables(step.num_reqs_padded)
        slots = self.tables.get_dummy_slot_mappings(step.num_tokens_padded)
        for table in self.tables.input_block_tables:
            self.oracle.compare_cells(table, 0)
        self.oracle.compare_slots(self.tables.slot_mappings, PAD)
        self.compared += self.tables.slot_mappings.numel() + slots.numel()
        if step.wide_index:
            for table in given:
                table.fill_(SENTINEL)

    def fresh_out(self) -> list[torch.Tensor]:
        """The caller's tables, filled with what no table holds."""
        for table in self.out:
            table.fill_(SENTINEL)
        return self.out

    def check(self, chunk: Chunk) -> None:
        """Read the counters: nothing differed, and every fault is one that the oracle counted."""
        self.tables.apply_staged_writes()
        oracle, groups = self.oracle, self.world.groups
        expected = {
            (FaultCode.EMPTY_RING if groups[g].circular else FaultCode.COLUMN_OUT_OF_ROW, g): count
            for g, count in enumerate(oracle.faults.tolist())
            if count
        }
        for g, group in enumerate(groups):
            if chunk.unknown_rows and group.maps_slots:
                expected[FaultCode.ROW_OUT_OF_RANGE, g] = chunk.unknown_rows
        oracle.faults.zero_()
        counted = {(fault.code, fault.group): fault.count for fault in self.tables.take_faults()}
        wrong = {"slots": int(oracle.wrong_slots), "table cells": int(oracle.wrong_cells)}
        if any(wrong.values()) or counted != expected:
            where = f"{self.world.name}, steps {self.steps - chunk.num_steps} to {self.steps}"
            raise Mismatch(f"{where}: wrong {wrong}, faults {counted}, expected {expected}")
        for (code, _), count in counted.items():
            self.faults[code.name.lower()] += count


class Arrays:
    """One step's device arrays by dtype and name."""

    def __init__(self, chunk: Chunk, uploaded: dict[str, torch.Tensor], place: int) -> None:
        def parts(kind: str) -> dict[str, torch.Tensor]:
            sizes = chunk.fields.sizes[kind]
            return dict(zip(sizes, uploaded[kind][place].split([*sizes.values()]), strict=True))

        self.int64, self.int32, self.bool = parts("int64"), parts("int32"), parts("bool")


@contextmanager
def counted_synchronisations() -> Iterator[list[Any]]:
    """Collect warnings, torch's about operations that wait for the GPU among them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")
