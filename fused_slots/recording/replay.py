"""Replay a recorded schedule through a manager, checked in every step by two oracles."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fused_slots.faults import IntegrityError, require_int
from fused_slots.groups import NULL_BLOCK_ID, PAD_SLOT_ID, ContextParallel
from fused_slots.recording.arrays import Int32Array
from fused_slots.recording.oracles import (
    FAULTS,
    UNKNOWN,
    Array,
    Batch,
    KVManagerOracle,
    ReferenceOracle,
)
from fused_slots.recording.repeat import (
    Results,
    batch_of_call,
    build_tables,
    repeat_call,
    state_digests,
)
from fused_slots.recording.schedule import Schedule, ScheduleStep
from fused_slots.reference import Outcome

MAX_MISMATCHES = 10
"""Mismatches kept in full; further ones are counted."""

CONTRACT = "the contract"

RUN = "the run that was recorded (whose engine may have written there itself)"

INTEGRITY_EVERY = 50
"""Steps between two `check_integrity` calls, which read every buffer back."""

# Request ids are int32; a damaged file may hold any text.
_PREFIX_HIT = re.compile(r"prefix hit \d+ of (\d{1,10})$")
_GONE = re.compile(r"(?:finished|preempted|aborted) (\d{1,10})$")


@dataclass(frozen=True)
class Mismatch:
    """One place where the manager and an oracle disagree, with the derivation of the slot."""

    step: int
    what: str
    expected: int | str
    actual: int | str
    oracle: str
    derivation: str = ""

    def __str__(self) -> str:
        head = f"step {self.step}: {self.what} is {self.actual}, {self.oracle} says {self.expected}"
        return f"{head}\n{self.derivation}" if self.derivation else head


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """One step as it came out of the manager.

    Attributes:
        index: number of the step.
        step: the recorded step.
        block_tables: per group, the gathered table, [num_reqs, width].
        microseconds: time of the manager's calls: the appends and one `step`.
        blocks_in_use: per group, distinct blocks that live requests hold.
        mismatches: what the oracles found in this step, at most `MAX_MISMATCHES`.
    """

    index: int
    step: ScheduleStep
    block_tables: tuple[Array, ...]
    microseconds: float
    blocks_in_use: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]


class Replay:
    """One pass of a schedule through a manager; iterate it once, then read the totals.

    Args:
        schedule: what to replay.
        device: the manager's device.
        context_parallel: replay as this rank; the KV manager then checks replicated groups only.
        replay_window: treat this many tokens after each prefix hit as replayed.
        pad_requests_to: fill each batch with dummies to a multiple of this, as graphs need.

    Attributes:
        tables: the manager.
        outcomes: per group, tokens by outcome, as the reference counted them.
        num_tail: slots behind the last token of a step, all groups.
        num_mismatches: all of them, listed or not.
        microseconds: per step.

    Raises:
        BlockTableError: the manager cannot be built for this device or these sizes.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        device: str = "cpu",
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
        replay_window: int = 0,
        pad_requests_to: int = 1,
    ) -> None:
        require_int("pad_requests_to", pad_requests_to, minimum=1)
        self.schedule = schedule
        settings = schedule.settings
        if settings is not None:
            context_parallel = ContextParallel(*settings["context_parallel"])
            replay_window = settings["replay_window"]
        self.tables = build_tables(schedule, device, context_parallel, replay_window)
        self.tables.warmup()
        rules = (schedule.groups, self.tables.layout.widths, context_parallel, replay_window)
        self._kv_manager = KVManagerOracle(*rules)
        null = self.tables.layout.null_block_id
        self._reference = ReferenceOracle(*rules, null, schedule.max_num_reqs)
        self._replay_window = replay_window
        self._pad_requests_to = pad_requests_to
        self._held: dict[int, tuple[int, tuple[Int32Array, ...]]] = {}
        self._sha256 = hashlib.sha256()
        self._faults_taken = 0
        self.num_tail = self.num_tokens = self.num_steps = self.num_mismatches = 0
        self.microseconds: list[float] = []

    @property
    def outcomes(self) -> list[Counter[Outcome]]:
        """Per group, tokens by outcome."""
        return self._reference.outcomes

    @property
    def digest(self) -> str:
        """Of every gathered table and every slot so far; equal on every device."""
        return self._sha256.hexdigest()

    def __iter__(self) -> Iterator[ReplayedStep]:
        for index, step in enumerate(self.schedule):
            batch = self._batch(step)
            microseconds, results = self._drive(step, batch)
            mismatches = list(self._judge(index, step, batch, results))
            last = index == len(self.schedule) - 1
            if step.call is not None:
                mismatches += self._compare_state(index) if last else ()
            elif index % INTEGRITY_EVERY == 0 or last:
                mismatches += self._check_faults(index)
                mismatches += self._check_integrity(index)
            self.num_steps += 1
            self.num_tokens += len(step.positions) if step.call is None else batch.num_tokens
            self.microseconds.append(microseconds)
            yield ReplayedStep(
                index,
                step,
                tuple(
                    _on_host(table[: batch.num_reqs]) for table in self.tables.input_block_tables
                ),
                microseconds,
                self._blocks_in_use(step),
                tuple(mismatches[:MAX_MISMATCHES]),
            )

    def _batch(self, step: ScheduleStep) -> Batch:
        if step.call is not None:
            return batch_of_call(step, step.call, self.schedule.max_num_batched_tokens)
        num_reqs, num_tokens = len(step.idx_mapping), len(step.positions)
        room = min(
            self.schedule.max_num_reqs - num_reqs,
            self.schedule.max_num_batched_tokens - num_tokens,
        )
        dummies = min(-num_reqs % self._pad_requests_to, room)
        replay_start = np.zeros(num_reqs + dummies, np.int32)
        if self._replay_window:
            hits = [int(match[1]) for event in step.events if (match := _PREFIX_HIT.match(event))]
            entries = np.flatnonzero(np.isin(step.request_ids, hits))
            replay_start[entries] = step.positions[step.query_start_loc[entries]]
        return Batch(
            np.concatenate([step.idx_mapping, np.full(dummies, -1, np.int32)]),
            np.concatenate(
                [step.query_start_loc, num_tokens + 1 + np.arange(dummies, dtype=np.int32)]
            ),
            np.concatenate([step.positions, np.zeros(dummies, np.int64)]),
            replay_start,
            step.num_computed_tokens,
            num_reqs,
            num_tokens + dummies,
        )

    def _drive(self, step: ScheduleStep, batch: Batch) -> tuple[float, Results]:
        """Append and step; returns the microseconds of these calls alone, and what they gave."""
        tables, call = self.tables, step.call
        device = tables.device
        idx_mapping, query_start_loc, positions, computed, replay_start = (
            torch.from_numpy(values).to(device)
            for values in (
                batch.idx_mapping,
                batch.query_start_loc,
                batch.positions,
                batch.num_computed_tokens,
                batch.replay_start,
            )
        )
        results = Results(tables.input_block_tables, tables.slot_mappings)
        begin = time.perf_counter_ns()
        for append in step.appends:
            append.stage(tables)
        if call is not None:
            results = repeat_call(tables, call, batch)
        else:
            tables.step(
                idx_mapping,
                query_start_loc,
                positions,
                num_computed_tokens=computed,
                replay_start=replay_start if self._replay_window else None,
            )
        # Reading one element back waits for the device.
        tables.slot_mappings[0, 0].item()
        microseconds = (time.perf_counter_ns() - begin) / 1000
        for append in step.appends:
            self._reference.append(append)
        return microseconds, results

    def _judge(
        self, index: int, step: ScheduleStep, batch: Batch, results: Results
    ) -> Iterator[Mismatch]:
        oracles: list[KVManagerOracle | ReferenceOracle] = [self._reference]
        if step.call is None:
            oracles.append(self._kv_manager)
        n = batch.num_tokens
        slots = _on_host(results.slots)
        self._sha256.update(slots.tobytes())
        self.num_tail += slots[:, n:].size
        for g in range(len(self.schedule.groups)):
            where = self.tables.layout.describe(g)
            behind = slots[g, n:] if len(slots) else slots[:0]
            unpadded = n + np.flatnonzero(behind != PAD_SLOT_ID)
            self.num_mismatches += len(unpadded)
            for token in unpadded[:1].tolist():
                what = f"the slot behind the last token, {token}, in {where}"
                yield Mismatch(index, what, PAD_SLOT_ID, int(slots[g, token]), CONTRACT)
            table = _on_host(results.tables[g]) if results.tables else None
            if table is not None:
                self._sha256.update(table.tobytes())
                yield from self._unused_cells(index, where, len(batch.idx_mapping), table)
            for oracle in oracles:
                if table is not None:
                    yield from self._compare_table(index, step, batch, g, table, oracle)
                if len(slots):
                    yield from self._compare_slots(index, step, batch, g, slots[g, :n], oracle)

    def _unused_cells(self, index: int, where: str, rows: int, table: Array) -> Iterator[Mismatch]:
        dirty = np.argwhere(table[rows:] != 0)
        self.num_mismatches += len(dirty)
        for row, column in dirty[:1].tolist():
            cell = (rows + row, column)
            what = f"unused cell {list(cell)} in the gathered table of {where}"
            yield Mismatch(index, what, 0, int(table[cell]), CONTRACT)

    def _compare_state(self, index: int) -> Iterator[Mismatch]:
        """Compare rows and slots at the end with those of the run that was recorded."""
        replayed = state_digests(self.tables)
        recorded = self.schedule.metadata.get("state") or {}
        for what, digest in replayed.items():
            found = recorded.get(what) if isinstance(recorded, dict) else None
            if found is not None and found != digest:
                self.num_mismatches += 1
                yield Mismatch(index, f"the digest of {what}", str(found), digest, RUN)

    def _compare_table(
        self,
        index: int,
        step: ScheduleStep,
        batch: Batch,
        g: int,
        table: Array,
        oracle: KVManagerOracle | ReferenceOracle,
    ) -> Iterator[Mismatch]:
        expected = oracle.block_table(g, step, batch)
        actual = table[: len(expected)]
        wrong = np.argwhere((expected != actual) & (expected != UNKNOWN))
        self.num_mismatches += len(wrong)
        for entry, column in wrong[:MAX_MISMATCHES].tolist():
            what = (
                f"column {column} of batch entry {entry} in the gathered table of "
                f"{self.tables.layout.describe(g)}"
            )
            seen = int(actual[entry, column])
            yield Mismatch(index, what, int(expected[entry, column]), seen, oracle.name)

    def _compare_slots(
        self,
        index: int,
        step: ScheduleStep,
        batch: Batch,
        g: int,
        slots: Array,
        oracle: KVManagerOracle | ReferenceOracle,
    ) -> Iterator[Mismatch]:
        expected = oracle.slots(g, step, batch)
        wrong = np.flatnonzero((expected != slots) & (expected != UNKNOWN))
        self.num_mismatches += len(wrong)
        for token in wrong[:MAX_MISMATCHES].tolist():
            entry = int(np.searchsorted(batch.query_start_loc, token, side="right")) - 1
            explanation = self.tables.explain(
                g,
                int(batch.idx_mapping[entry]),
                int(batch.positions[token]),
                int(batch.replay_start[entry]),
                None if batch.replay_len is None else int(batch.replay_len[entry]),
            )
            yield Mismatch(
                index,
                f"the slot of token {token} (batch entry {entry}) in "
                f"{self.tables.layout.describe(g)}",
                int(expected[token]),
                int(slots[token]),
                oracle.name,
                str(explanation),
            )

    def _check_faults(self, index: int) -> Iterator[Mismatch]:
        self._faults_taken += sum(fault.count for fault in self.tables.take_faults())
        expected = sum(counts[outcome] for counts in self.outcomes for outcome in FAULTS)
        if self._faults_taken != expected:
            self.num_mismatches += 1
            what, oracle = "the number of faults so far", self._reference.name
            yield Mismatch(index, what, expected, self._faults_taken, oracle)

    def _check_integrity(self, index: int) -> Iterator[Mismatch]:
        # A schedule recorded on one rank has prefix hits longer than the blocks that a rank of
        # several needs, so its ranks would write into the shared blocks.
        if self.tables.cp_size > 1:
            return
        try:
            self.tables.check_integrity()
        except IntegrityError as error:
            self.num_mismatches += 1
            yield Mismatch(index, "integrity", error.expected, error.actual, CONTRACT)

    def _blocks_in_use(self, step: ScheduleStep) -> tuple[int, ...]:
        gone = {int(match[1]) for event in step.events if (match := _GONE.match(event))}
        held = {row: of for row, of in self._held.items() if of[0] not in gone}
        for entry, row in enumerate(step.idx_mapping.tolist()):
            blocks = tuple(blocks_of[entry] for blocks_of in step.expected_blocks)
            held[row] = int(step.request_ids[entry]), blocks
        self._held = held
        nothing, num_groups = np.full(1, NULL_BLOCK_ID, np.int32), len(self.schedule.groups)
        return tuple(
            len(np.setdiff1d(np.concatenate([nothing, *of_group]), nothing))
            for of_group in ([blocks[g] for _, blocks in held.values()] for g in range(num_groups))
        )


def _on_host(values: torch.Tensor) -> Array:
    return values.cpu().numpy().astype(np.int64)
