"""Staged writes as the Ascend step kernel reads them: planes over rows (kernels/ascend/table.py).

A reader looks a row's numbers up in planes that it holds on chip, so every plane has a number for
every row, whether it is written or not, and lengths are read from the packet alone.

For R rows of which J are written, in G groups, with M new columns in all, a packet is int32:
generations of all rows [R]; starts, lengths and bases [3, G, R]; written rows [J]; column ids [M].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.faults import INT32_MAX
from fused_slots.host.staging import StagedWrites
from fused_slots.layout import TableLayout


@dataclass(frozen=True)
class StagedRows:
    """int32 views of a packet, or of the device's own rows: step_on_ascend's arguments."""

    generations: torch.Tensor
    starts: torch.Tensor
    plane: int
    written_rows: torch.Tensor
    num_written_rows: int


class RowPacker:
    """Packs one manager's staged writes; knows the lengths that the device has.

    Args:
        layout: the manager's sizes.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._num_groups, self._num_rows = layout.num_groups, layout.max_num_reqs
        self._filled = np.zeros((layout.num_groups, layout.max_num_reqs), dtype=np.int32)
        self._generations = np.zeros(layout.max_num_reqs, dtype=np.int32)

    def size(self, writes: StagedWrites) -> int:
        """int32 elements of the packet.

        Raises:
            OverflowError: they are more than an int32 offset reaches.
        """
        # A tensor without elements may have no address; one id more costs nothing.
        size = self._rows_at + len(writes.rows) + len(writes.column_ids) + 1
        if size > INT32_MAX:
            raise OverflowError("more columns are staged than int32 offsets reach")
        return size

    def pack(self, writes: StagedWrites, packet: npt.NDArray[np.int32]) -> None:
        """Fill a packet.

        Args:
            writes: the merged writes of one step.
            packet: int32, at least `size` long.
        """
        rows, num_rows, num_groups = writes.rows, self._num_rows, self._num_groups
        self._filled[:, rows] = writes.filled.T
        self._generations[rows] = writes.generations
        packet[:num_rows] = self._generations
        planes = packet[num_rows : self._rows_at]
        starts, filled, bases = planes.reshape(3, num_groups, num_rows)
        filled[:] = self._filled
        starts[:] = self._filled
        starts[:, rows] = writes.starts.T
        ids_at = self._rows_at + len(rows)
        lengths_at = num_rows * (1 + num_groups + np.arange(num_groups))
        # A start below 0 empties a row: its staged zeros begin at column 0.
        bases[:, rows] = (writes.offsets - np.maximum(writes.starts, 0)).T
        bases[:, rows] += (ids_at - lengths_at)[:, None].astype(np.int32)
        packet[self._rows_at : ids_at] = rows
        packet[ids_at : ids_at + len(writes.column_ids)] = writes.column_ids

    def views(self, packet: torch.Tensor, writes: StagedWrites) -> StagedRows:
        """The parts of a packet on the device; `starts` reaches to its end."""
        num_rows, num_written = self._num_rows, len(writes.rows)
        return StagedRows(
            generations=packet[:num_rows],
            starts=packet[num_rows:],
            plane=self._num_groups * num_rows,
            written_rows=packet[self._rows_at : self._rows_at + num_written],
            num_written_rows=num_written,
        )

    @property
    def _rows_at(self) -> int:
        return (1 + 3 * self._num_groups) * self._num_rows
