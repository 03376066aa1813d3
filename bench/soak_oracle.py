"""What a soak's steps must show, in plain torch operations on the device.

Where a token lies is not computed by a formula but dealt: tokens 0, 1, 2 ... of a request are given
to ranks in turns, and each rank lays its own into columns one after the other. Columns below the
window are counted likewise. Tables are followed cell by cell as the life tells.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.soak_plan import Array, World

PAD = -1


class Oracle:
    """Expected tables and slots of one world, and counters of what differed.

    Args:
        world: the manager's configuration.
        device: where everything lies.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        groups, rows = world.groups, world.num_rows
        widths = [group.row_width for group in groups]

        def on_device(array: Array) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        dealt = [deal_tokens(world, g) for g in range(len(groups))]
        self._column_of = on_device(np.stack([columns for columns, _ in dealt]))
        self._offset_of = on_device(np.stack([offsets for _, offsets in dealt]))
        windows = [columns_below_window(world, g) for g in range(len(groups))]
        self._below_window = on_device(np.stack(windows, axis=1))
        self._group_of = on_device(np.repeat(np.arange(len(groups)), widths))
        self._column = on_device(np.concatenate([np.arange(width) for width in widths]))
        self._first = on_device((np.cumsum(widths) - widths)[:, None])
        self._sizes = on_device(np.array([[group.tokens_per_column] for group in groups]))
        self._cacheable = on_device(np.array([[group.prefix_cacheable] for group in groups]))
        self.row_size = sum(widths)
        # One row more than the manager has: the empty row of dummies.
        self.tables = torch.zeros((rows + 1) * self.row_size, dtype=torch.int32, device=device)
        self.wrong_slots = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong_cells = torch.zeros((), dtype=torch.int64, device=device)
        self.faults = torch.zeros(len(groups), dtype=torch.int64, device=device)

    def write(self, cells: torch.Tensor, values: torch.Tensor) -> None:
        """Follow a step's appends: int64 [M] elements of the tables, int32 [M] their contents."""
        self.tables.scatter_(0, cells, values)

    def slots(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        not_replayed: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Slots int64 [G, T]; tokens beyond their rows are counted as faults.

        Args:
            rows: int64 [T], the row of each token, the empty row where there is none.
            positions: int64 [T].
            wanted: bool [T], tokens of a request.
            not_replayed: bool [T], those of them that cacheable groups write.
            lengths: int32 [num_rows + 1, G], filled columns.
        """
        column = self._column_of[:, positions]
        offset = self._offset_of[:, positions]
        wants = torch.where(self._cacheable, not_replayed, wanted) & (column >= 0)
        mapped = wants & (column < lengths.t()[:, rows])
        self.faults += (wants ^ mapped).sum(1)
        cells = rows * self.row_size + self._first + column.clamp(min=0)
        return torch.where(mapped, self.tables[cells] * self._sizes + offset, PAD)

    def gathered(
        self, rows: torch.Tensor, computed: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Gathered rows int32 [B, all columns of all groups], the groups side by side.

        Args:
            rows: int64 [B], the empty row for dummies.
            computed: int64 [B], computed tokens of each; 0 = nothing lies below a window.
            lengths: int32 [num_rows + 1, G], filled columns.
        """
        filled = lengths[rows][:, self._group_of]
        below = self._below_window[computed][:, self._group_of]
        live = (self._column < filled) & (self._column >= below)
        return self.tables.view(-1, self.row_size)[rows] * live

    def compare_slots(self, actual: torch.Tensor, expected: torch.Tensor | int) -> None:
        self.wrong_slots += (actual != expected).sum()

    def compare_cells(self, actual: torch.Tensor, expected: torch.Tensor | int) -> None:
        self.wrong_cells += (actual != expected).sum()


def deal_tokens(world: World, g: int) -> tuple[Array, Array]:
    """Column and offset of every position of a request in a group; column -1 = no slot here."""
    group, count = world.groups[g], world.max_len
    columns, offsets = np.full(count, PAD, np.int64), np.zeros(count, np.int64)
    if not group.maps_slots:
        return columns, offsets
    if group.circular:
        ring = range(group.tokens_per_column)
        return np.zeros(count, np.int64), np.resize(np.array(ring), count)
    shards, held = world.shards(g), 0
    turns = [rank for rank in range(shards) for _ in range(world.context_parallel.interleave)]
    mine = world.context_parallel.rank if shards > 1 else 0
    for position in range(count):
        if turns[position % len(turns)] == mine:
            columns[position], offsets[position] = divmod(held, group.tokens_per_column)
            held += 1
    return columns, offsets


def columns_below_window(world: World, g: int) -> Array:
    """By computed tokens, how many columns attention can no longer read."""
    group = world.groups[g]
    below = np.zeros(world.max_len + 1, dtype=np.int64)
    if group.sliding_window_reach and world.context_parallel.size == 1:
        passed = 0
        for first_read in range(1, world.max_len + 1 - group.sliding_window_reach):
            passed += first_read == (passed + 1) * group.tokens_per_column
            below[first_read + group.sliding_window_reach] = passed
    return below
