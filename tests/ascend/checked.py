"""Calls of a manager on executed code, each checked against the oracles, for one wanted variant.

The wanted variant says which call is made, with which dtypes and of which sizes; a check fails if
the plan chooses another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from hivm import EXACT, Modes
from hivm.order import Trace
from hivm_backend import executed_on
from kernel_cases import Batch, Setup, expected, fill_rows, random_batch
from step_model import StepModel

from fused_slots import AscendBlockTables
from fused_slots.backends.ascend.plan import SHORT_QUERY, SPAN, TILE
from fused_slots.backends.launch import Variant

CASES_OF_ROWS = 20
"""Cases after which rows are filled anew."""


def make(
    setup: Setup, target: str, modes: Modes = EXACT, recorded: bool = False
) -> AscendBlockTables:
    with executed_on(target, modes=modes, recorded=recorded):
        return setup.make()


def faults_of(tables: AscendBlockTables) -> Counter[tuple[str, int]]:
    return Counter({(f.code.name, f.group): f.count for f in tables.take_faults()})


class CheckedVariant:
    """One variant of a kernel, on a manager that has it.

    Args:
        setup: the manager's configuration.
        target: whose code is executed.
        variant: of this configuration.
        modes: how the executed hardware rounds.
        recorded: whether `traces` holds what the variant's programs did, equal ones once.
    """

    def __init__(
        self,
        setup: Setup,
        target: str,
        variant: Variant,
        modes: Modes = EXACT,
        *,
        recorded: bool = False,
    ) -> None:
        self.variant, self.constants = variant, dict(variant.constants)
        self.long = bool(self.constants["RUNS"])
        # Some tiles, or some spans, and an odd number of tokens.
        capacity = SPAN + 391 if self.long else 4 * TILE + 7
        self.setup = setup = replace(setup, capacity=capacity)
        self.tables = make(setup, target, modes, recorded)
        self.traces: dict[tuple[object, ...], Trace] = {}
        self.rng = np.random.default_rng(len(str(variant)))
        self.cases = 0
        self._rows = [{row: [] for row in range(setup.num_rows)} for _ in setup.groups]
        self._model = StepModel(setup, self.tables, self.rng)

    def run(self, cases: int) -> None:
        """Check so many random batches; raises AssertionError, or a HivmFault, with the case."""
        check = self._slots
        if self.variant.kernel == "step_on_ascend":
            check = self._gather if self.constants["WHOLE"] else self._step
        elif self.constants["FLAT"]:
            check = self._drafts
        for _ in range(cases):
            check(f"{self.variant}, case {self.cases}")
            done = self.tables._backend.launcher.executions
            assert done[-1][0] == self.variant
            self.traces |= {trace.key: trace for trace in done[-1][1].traces}
            done.clear()
            self.cases += 1

    def _slots(self, message: str) -> None:
        batch = self._batch()
        out, view = self._poisoned(), self._view(batch)
        self.tables.compute_slot_mappings(
            *self._arguments(batch), view, out=out, **self._replay(batch)
        )
        slots, faults = expected(self.setup, batch, view)
        np.testing.assert_array_equal(out.numpy(), slots, f"{message}: {batch.kind}")
        assert faults_of(self.tables) == faults, message

    def _drafts(self, message: str) -> None:
        batch = self._batch()
        flat = np.repeat(batch.idx_mapping, np.diff(batch.query_start_loc))
        flat = np.concatenate([np.full(batch.query_start_loc[0], -1), flat])
        starts = np.arange(len(flat) + 1, dtype=np.int32)
        drafts = Batch(batch.kind, batch.rows, flat, starts, batch.positions, None)
        index, _, positions = self._arguments(drafts)
        out = self._poisoned()
        self.tables.map_tokens(index, positions, out=out)
        slots, faults = expected(self.setup, drafts)
        np.testing.assert_array_equal(out.numpy(), slots, f"{message}: {batch.kind}")
        assert faults_of(self.tables) == faults, message

    def _step(self, message: str) -> None:
        """Writes, gather, slots and padding in one launch, batch slots kept and exchanged."""
        model, tables = self._model, self.tables
        model.change_rows()
        batch = model.batch()
        padded = int(self.rng.integers(len(batch.idx_mapping), self.setup.num_rows + 1))
        computed, view = model.computed_tokens(), self._view(batch)
        tables.slot_mappings.fill_(-77)
        launches = tables.launches
        gathered, _ = tables.step(
            *self._arguments(batch),
            num_reqs_padded=padded,
            num_tokens_padded=view,
            num_computed_tokens=None if computed is None else torch.from_numpy(computed),
            **self._replay(batch),
        )
        assert tables.launches == launches + 1
        slots, faults = expected(self.setup, self._replayed(batch), view)
        faults = Counter({key: n for key, n in faults.items() if key[0] != "ROW_OUT_OF_RANGE"})
        message = f"{message}: {batch.kind}"
        np.testing.assert_array_equal(tables.slot_mappings.numpy(), slots, message)
        for g, table in enumerate(gathered):
            np.testing.assert_array_equal(
                table.numpy(), model.gathered(g, batch, padded, computed), f"{message}, group {g}"
            )
            assert not tables.input_block_tables[g][padded:].any(), message
        np.testing.assert_array_equal(tables.num_blocks.gpu.numpy(), tables.num_blocks.np)
        assert faults_of(tables) == faults + model.gather_faults(batch), message

    def _gather(self, message: str) -> None:
        """Whole rows into tables of the caller."""
        model, tables = self._model, self.tables
        model.change_rows()
        tables.apply_staged_writes()
        batch = model.batch()
        index, num_reqs = self._arguments(batch)[0], len(batch.idx_mapping)
        out = [
            torch.full((num_reqs + 2, table.shape[1] + int(self.rng.integers(0, 40))), -77,
                       dtype=torch.int32)
            for table in tables.input_block_tables
        ]  # fmt: skip
        tables.gather_block_tables(index, num_reqs + 1, out=out)
        for g, table in enumerate(out):
            whole = model.gathered(g, batch, num_reqs + 1, None, table.shape[1])
            np.testing.assert_array_equal(table[: num_reqs + 1].numpy(), whole, message)
            assert (table[num_reqs + 1] == -77).all(), message
        assert faults_of(tables) == model.gather_faults(batch), message

    def _batch(self) -> Batch:
        if self.cases % CASES_OF_ROWS == 0:
            self._rows = fill_rows(self.tables, self.setup, self.rng)
        return self._replayed(random_batch(self.setup, self._rows, self.rng))

    def _replayed(self, batch: Batch) -> Batch:
        """The batch as this variant sees it: without replay starts unless it reads them."""
        if self.constants["REPLAY"]:
            return batch
        return Batch(batch.kind, batch.rows, batch.idx_mapping, batch.query_start_loc,
                     batch.positions, None)  # fmt: skip

    def _replay(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The batch's replay as keywords of a call."""
        batch = self._replayed(batch)
        given = {"replay_start": batch.replay_start, "replay_len": batch.replay_len}
        return {name: torch.from_numpy(a) for name, a in given.items() if a is not None}

    def _view(self, batch: Batch) -> int:
        """Tokens that the caller says it expects, such that this variant is chosen."""
        short = min(SHORT_QUERY * len(batch.idx_mapping), self.setup.capacity)
        low, high = (short + 1, self.setup.capacity) if self.long else (0, short)
        truth = min(max(len(batch.positions), low), high)
        return int(self.rng.choice([truth, int(self.rng.integers(low, high + 1))]))

    def _poisoned(self) -> torch.Tensor:
        return torch.full(
            (len(self.setup.groups), self.setup.capacity), -77, dtype=self.variant.slot_dtype
        )

    def _arguments(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.from_numpy(batch.idx_mapping).to(self.variant.index_dtype),
            torch.from_numpy(batch.query_start_loc),
            torch.from_numpy(batch.positions),
        )
