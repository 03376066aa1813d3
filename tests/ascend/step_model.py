"""A plain model of rows and gathered tables beside a manager, for whole steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
from kernel_cases import Batch, Setup, random_batch, with_nulls

from fused_slots import AscendBlockTables


class StepModel:
    """Changes rows of a manager at random and knows what each row then holds."""

    def __init__(
        self, setup: Setup, tables: AscendBlockTables, rng: np.random.Generator
    ) -> None:
        self.setup, self.tables, self.rng = setup, tables, rng
        self.rows: list[dict[int, list[int]]] = [
            {row: [] for row in range(setup.num_rows)} for _ in setup.groups
        ]
        self._last: Batch | None = None

    def change_rows(self) -> None:
        """Grow some rows, start some anew; in some steps none."""
        for row in self.rng.permutation(self.setup.num_rows)[: self.rng.choice([0, 1, 3, 12])]:
            self._change(int(row), overwrite=bool(self.rng.random() < 0.3))

    def batch(self) -> Batch:
        """A batch; in half of the steps of the rows that the one before had."""
        batch = random_batch(self.setup, self.rows, self.rng)
        last = self._last
        if last is not None and self.rng.random() < 0.5:
            shared = min(len(last.idx_mapping), len(batch.idx_mapping))
            batch.idx_mapping[:shared] = last.idx_mapping[:shared]
        self._last = batch
        return batch

    def computed_tokens(self) -> np.ndarray | None:
        """num_computed_tokens by row, or None."""
        if self.rng.random() < 0.3:
            return None
        return self.rng.integers(-5, 2500, self.setup.num_rows).astype(np.int32)

    def gathered(
        self,
        g: int,
        batch: Batch,
        num_rows: int,
        computed: np.ndarray | None,
        width: int | None = None,
    ) -> np.ndarray:
        """What group g's gathered table must hold."""
        group = self.setup.groups[g]
        table = np.zeros((num_rows, width or self.tables.input_block_tables[g].shape[1]), np.int32)
        for b, row in enumerate(batch.idx_mapping.tolist()):
            if not 0 <= row < self.setup.num_rows:
                continue
            ids = self.rows[g][row]
            table[b, : len(ids)] = ids
            reach = group.sliding_window_reach
            if computed is not None and reach and self.setup.context_parallel.size == 1:
                below = max(int(computed[row]) - reach, 0) // group.tokens_per_column
                table[b, : min(below, len(ids))] = 0
        return table

    def gather_faults(self, batch: Batch) -> Counter[tuple[str, int]]:
        """Batch entries whose row does not exist, once for each group."""
        strange = int((batch.idx_mapping >= self.setup.num_rows).sum())
        groups = range(len(self.setup.groups))
        return Counter({("ROW_OUT_OF_RANGE", g): strange for g in groups if strange})

    def _change(self, row: int, overwrite: bool) -> None:
        ids: list[list[int]] = []
        for g, group in enumerate(self.setup.groups):
            held = 0 if overwrite else len(self.rows[g][row]) // group.columns_per_block
            room = group.max_num_blocks - held
            most = int(self.rng.choice([1, 3, 40, group.max_num_blocks]))
            count = int(self.rng.integers(0, min(room, most, 3000) + 1))
            limit = 2**24 // group.block_size - 1
            ids.append(with_nulls(self.setup, self.rng.integers(0, limit, count), self.rng))
        self.tables.append_block_ids(row, tuple(ids), overwrite=overwrite)
        for g, group in enumerate(self.setup.groups):
            n = group.columns_per_block
            kept = [] if overwrite else self.rows[g][row]
            self.rows[g][row] = kept + [k * n + c for k in ids[g] for c in range(n)]
