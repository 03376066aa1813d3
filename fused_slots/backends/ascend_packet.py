"""Staged writes as the Ascend step kernel reads them (kernels/step_ascend.py): planes over rows.

A reader looks a row's numbers up in planes that it holds on chip, so every plane has an entry for
every row, whether it is written or not, and lengths are read from the packet alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.host.staging import StagedWrites
from fused_slots.layout import TableLayout


@dataclass(frozen=True)
class StagedPlanes:
    """Views of one packet, all int32: see step_on_ascend's arguments of these names."""

    generations: torch.Tensor
    filled: torch.Tensor
    starts: torch.Tensor
    bases: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor


class AscendPacker:
    """Packs one manager's staged writes; knows the lengths that the device has.

    Args:
        layout: the manager's sizes.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._num_groups, self._num_rows = layout.num_groups, layout.max_num_reqs
        self._filled = np.zeros((layout.num_groups, layout.max_num_reqs), dtype=np.int32)
        self._generations = np.zeros(layout.max_num_reqs, dtype=np.int32)

    def size(self, writes: StagedWrites) -> int:
        """int32 elements of the packet."""
        planes = (1 + 3 * self._num_groups) * self._num_rows
        # A tensor without elements may have no address; one id more costs nothing.
        return planes + len(writes.rows) + len(writes.column_ids) + 1

    def pack(self, writes: StagedWrites, packet: npt.NDArray[np.int32]) -> None:
        """Fill a packet: generations, filled, starts and bases of all rows, written rows, ids.

        Args:
            writes: the merged writes of one step.
            packet: int32, at least `size` long.
        """
        rows, num_rows = writes.rows, self._num_rows
        self._filled[:, rows] = writes.filled.T
        self._generations[rows] = writes.generations
        packet[:num_rows] = self._generations
        planes = packet[num_rows : num_rows * (1 + 3 * self._num_groups)]
        filled, starts, bases = planes.reshape(3, self._num_groups, num_rows)
        filled[:] = self._filled
        starts[:] = self._filled
        starts[:, rows] = writes.starts.T
        bases[:, rows] = (writes.offsets - writes.starts).T
        rest = packet[num_rows * (1 + 3 * self._num_groups) :]
        rest[: len(rows)] = rows
        rest[len(rows) : len(rows) + len(writes.column_ids)] = writes.column_ids

    def planes(self, packet: torch.Tensor, writes: StagedWrites) -> StagedPlanes:
        """The parts of a packet on the device."""
        size = self._num_groups * self._num_rows
        sizes = [self._num_rows, size, size, size, len(writes.rows), len(writes.column_ids) + 1]
        return StagedPlanes(*torch.split(packet[: sum(sizes)], sizes))
