"""A manager beside plain lists: its gathered tables are what a full copy gives, every time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused_slots import AscendBlockTables, KVCacheGroup, SlotMappingMode
from tests.backends_under_test import MakeTables, int32, int64

PAGED = KVCacheGroup(4, 12)
SLIDING = KVCacheGroup(4, 12, sliding_window_reach=10)
SPLIT = KVCacheGroup(8, 6, 4)
RING = KVCacheGroup(8, 1, circular=True, prefix_cacheable=False)
STATE = KVCacheGroup(64, 3, slot_mapping_mode=SlotMappingMode.NONE)
GROUPS = (PAGED, SLIDING, SPLIT, RING, STATE)

ROWS = 10
"""More than a gathering program's batch entries."""

SCRIBBLE = 9_999
"""What callers write into tables that are theirs for a while."""


class FullCopy:
    """Rows as lists of columns, and calls whose results are compared with them.

    Args:
        make_tables: the backend.
        groups: the KV cache groups.
        one_call: make each step one call of `step`; else apply, gather and map one by one.
    """

    def __init__(
        self,
        make_tables: MakeTables,
        groups: Sequence[KVCacheGroup] = GROUPS,
        one_call: bool = True,
        num_rows: int = ROWS,
    ) -> None:
        self.groups = groups
        self.one_call = one_call
        self.tables: AscendBlockTables = make_tables(
            groups, max_num_reqs=num_rows, max_num_batched_tokens=48
        )
        self.rows: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_rows)]
        self._next_id = 1

    def write(self, row: int, counts: int | Sequence[int], overwrite: bool) -> None:
        """Stage that many new blocks (of each group, as far as they fit), every id a new one."""
        if isinstance(counts, int):
            counts = [counts] * len(self.groups)
        block_ids = []
        for g, (group, count) in enumerate(zip(self.groups, counts, strict=True)):
            n = group.columns_per_block
            held = 0 if overwrite else len(self.rows[row][g])
            room = (self.tables.layout.widths[g] - held) // n
            if group.circular or not group.maps_slots:
                room = min(room, group.max_num_blocks - held)
            ids = list(range(self._next_id, self._next_id + min(count, room)))
            self._next_id += len(ids)
            columns = [block * n + j for block in ids for j in range(n)]
            self.rows[row][g] = columns if overwrite else self.rows[row][g] + columns
            block_ids.append(ids)
        self.tables.append_block_ids(row, block_ids, overwrite=overwrite)

    def start(self, row: int, counts: int | Sequence[int] = 3) -> None:
        """A new request on a row."""
        self.write(row, counts, overwrite=True)

    def append(self, row: int, counts: int | Sequence[int] = 1) -> None:
        """New blocks of the request on a row."""
        self.write(row, counts, overwrite=False)

    def run(
        self, batch: Sequence[int], padded: int | None = None, computed: int | None = None
    ) -> None:
        """One step of these rows, two tokens each; gathered tables and slots are checked.

        Args:
            batch: the rows, -1 = dummy.
            padded: rows to return.
            computed: computed tokens of row r are this plus r; None = no column is nulled.
        """
        tables = self.tables
        idx = int32(tables, batch)
        padded = max(len(batch), 0) if padded is None else padded
        by_row = self._by_row(computed)
        positions = [p for row in batch for p in self._positions(row)]
        starts = int32(tables, range(0, 2 * len(batch) + 1, 2))
        if self.one_call:
            gathered, slots = tables.step(
                idx,
                starts,
                int64(tables, positions),
                num_reqs_padded=padded,
                num_computed_tokens=by_row,
            )
        else:
            tables.apply_staged_writes()
            gathered = tables.gather_block_tables(idx, padded, num_computed_tokens=by_row)
            slots = tables.compute_slot_mappings(idx, starts, int64(tables, positions), 48)
        self.check_gathered(batch, computed, gathered, padded)
        self._check_slots(batch, positions, slots)

    def gather(self, batch: Sequence[int], computed: int | None) -> tuple[torch.Tensor, ...]:
        """The gathered tables of these rows; what is staged is not applied."""
        return self.tables.gather_block_tables(
            int32(self.tables, batch), len(batch), num_computed_tokens=self._by_row(computed)
        )

    def gather_out(self, batch: Sequence[int], computed: int | None = None) -> None:
        """Gather into tables of the caller, which leaves the manager's own alone."""
        tables = self.tables
        tables.apply_staged_writes()
        own = [table.clone() for table in tables.input_block_tables]
        out = [
            torch.full((len(batch) + 1, width), SCRIBBLE, dtype=torch.int32, device=tables.device)
            for width in tables.layout.widths
        ]
        tables.gather_block_tables(
            int32(tables, batch), len(batch), out=out, num_computed_tokens=self._by_row(computed)
        )
        for g, table in enumerate(out):
            assert table[: len(batch)].tolist() == self.expected(g, batch, computed, len(batch))
            assert set(table[len(batch)].tolist()) == {SCRIBBLE}
            assert torch.equal(own[g], tables.input_block_tables[g])

    def dummy(self, count: int) -> None:
        """A dummy run whose caller scribbles over all it was given."""
        for table in self.tables.get_dummy_block_tables(count):
            assert not table.any()
            table.fill_(SCRIBBLE)

    def expected(
        self, g: int, batch: Sequence[int], computed: int | None, num_rows: int
    ) -> list[list[int]]:
        """A full copy of the batch's rows of one group, zero behind it."""
        group, width = self.groups[g], self.tables.layout.widths[g]
        lines = []
        for row in batch:
            columns = self.rows[row][g] if row >= 0 else []
            nulls = 0
            if computed is not None and group.sliding_window_reach and row >= 0:
                below = max(computed + row - group.sliding_window_reach, 0)
                nulls = min(below // group.tokens_per_column, len(columns))
            lines.append([0] * nulls + columns[nulls:] + [0] * (width - len(columns)))
        return lines + [[0] * width] * (num_rows - len(batch))

    def check_gathered(
        self,
        batch: Sequence[int],
        computed: int | None,
        gathered: Sequence[torch.Tensor],
        padded: int,
    ) -> None:
        """The returned rows and every other row of the manager's gathered tables."""
        for g, (view, whole) in enumerate(
            zip(gathered, self.tables.input_block_tables, strict=True)
        ):
            expected = torch.tensor(self.expected(g, batch, computed, len(self.rows)))
            assert view.shape[0] == padded
            assert torch.equal(whole.cpu().long(), expected), f"group {g}"

    def _by_row(self, computed: int | None) -> torch.Tensor | None:
        if computed is None:
            return None
        return int32(self.tables, [computed + row for row in range(len(self.rows))])

    def _positions(self, row: int) -> tuple[int, int]:
        """The first token of a row and the last one that every paged group holds."""
        if row < 0:
            return (0, 0)
        held = [
            len(columns) * group.tokens_per_column
            for group, columns in zip(self.groups, self.rows[row], strict=True)
            if group.maps_slots and not group.circular
        ]
        return (0, max(min(held) - 1, 0))

    def _check_slots(
        self, batch: Sequence[int], positions: Sequence[int], slots: torch.Tensor
    ) -> None:
        for g, group in enumerate(self.groups):
            expected = []
            for token, position in enumerate(positions):
                row = batch[token // 2]
                size = group.tokens_per_column
                column = 0 if group.circular else position // size
                columns = self.rows[row][g] if row >= 0 else []
                found = group.maps_slots and column < len(columns)
                expected.append(columns[column] * size + position % size if found else -1)
            assert slots[g].tolist() == expected + [-1] * (slots.shape[1] - len(expected))
