"""Staged writes as one int32 packet, as the kernels read it (kernels/staged.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fused_slots.layout import TableLayout
from fused_slots.staging import StagedWrites


def packet_size(writes: StagedWrites, layout: TableLayout) -> int:
    """int32 elements of the packet."""
    fields = layout.max_num_reqs + 2 * len(writes.rows) + 3 * writes.counts.size
    return fields + len(writes.column_ids)


def pack_writes(writes: StagedWrites, layout: TableLayout, packet: npt.NDArray[np.int32]) -> None:
    """Fill a packet: record of each row, rows and generations, records, column ids.

    Args:
        writes: the merged writes of one step.
        layout: the manager's sizes.
        packet: int32, at least `packet_size` long.
    """
    num_rows, num_written = layout.max_num_reqs, len(writes.rows)
    lines_end = num_rows + 2 * num_written
    records_end = lines_end + 3 * writes.counts.size
    packet[:num_rows] = -1
    packet[writes.rows] = np.arange(num_written, dtype=np.int32)
    packet[num_rows:lines_end:2] = writes.rows
    packet[num_rows + 1 : lines_end : 2] = writes.generations
    records = packet[lines_end:records_end].reshape(num_written, layout.num_groups, 3)
    records[:, :, 0] = writes.starts
    records[:, :, 1] = writes.filled
    records[:, :, 2] = writes.offsets
    packet[records_end : records_end + len(writes.column_ids)] = writes.column_ids
