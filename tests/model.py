"""What a manager must hold, in plain Python: its rows, and one step's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.configuration import Config

SENTINEL = -77777
"""What outputs are filled with before a call; no slot and no block id."""

POISON = 1_999_999_993
"""What cells that nobody may read are filled with."""


class Mismatch(AssertionError):
    """A manager's answer differs from an oracle's, or the oracles differ."""


class Batch(NamedTuple):
    """One step's arguments as the host knows them; positions may be longer than its tokens."""

    idx_mapping: list[int]
    query_start_loc: list[int]
    positions: list[int]
    replay_start: list[int] | None = None
    num_computed_tokens: list[int] | None = None
    replay_len: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc[len(self.idx_mapping)]

    def token_entries(self) -> list[int]:
        """The batch entry of every token."""
        starts = self.query_start_loc
        return [
            b for b in range(len(self.idx_mapping)) for _ in range(starts[b + 1] - starts[b])
        ]


class TableModel:
    """Every group's rows: `staged` as the host has them, `visible` as the device does."""

    def __init__(self, config: Config, widths: Sequence[int]) -> None:
        self.config = config
        self.widths = list(widths)
        rows = config.max_num_reqs
        self.staged: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in config.groups]
        self.visible: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in config.groups]
        self.tables = [np.zeros((rows, width), dtype=np.int64) for width in self.widths]
        self.lengths = [np.zeros(rows, dtype=np.int64) for _ in config.groups]
        self.largest_ids = [0] * len(config.groups)
        self.pending: set[int] = set()
        self.cleared: set[int] = set()
        """Pending rows that were given back."""
        self.cells = [np.zeros(rows, dtype=np.int64) for _ in config.groups]
        """Cells of a device row that have held an id since it was given back."""

    def append(self, row: int, ids: Sequence[Sequence[int]], overwrite: bool) -> None:
        for g, (group, new) in enumerate(zip(self.config.groups, ids, strict=True)):
            n = group.columns_per_block
            columns = [k * n + j for k in new for j in range(n)]
            self.staged[g][row] = columns if overwrite else self.staged[g][row] + columns
            self.largest_ids[g] = max([self.largest_ids[g], *new])
        self.pending.add(row)

    def clear(self, row: int) -> None:
        for rows in self.staged:
            rows[row] = []
        self.pending.add(row)
        self.cleared.add(row)

    def write(self, row: int, first_blocks: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        for g, (group, first) in enumerate(zip(self.config.groups, first_blocks, strict=True)):
            del self.staged[g][row][first * group.columns_per_block :]
        self.append(row, ids, False)

    def apply(self) -> None:
        for row in self.pending:
            for g, rows in enumerate(self.staged):
                self.visible[g][row] = columns = list(rows[row])
                self.lengths[g][row] = len(columns)
                self.tables[g][row, : len(columns)] = columns
                self.cells[g][row] = max(self.cells[g][row], len(columns))
        self.pending.clear()
        self.cleared.clear()

    def free_blocks(self, g: int, row: int, overwrite: bool) -> int:
        """Allocation blocks that still fit into a row."""
        group = self.config.groups[g]
        used = 0 if overwrite else len(self.staged[g][row])
        return (self.widths[g] - used) // group.columns_per_block
