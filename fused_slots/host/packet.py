"""Staged writes as one int32 packet, as the kernels read it (kernels/staged.py).

For R rows of which J are written, in G groups, with M new columns in all:
record of each row, -1 = none [R]; row and generation of each record [J, 2]; start, filled and
offset of each record and group [J, G, 3]; column ids [M], where `offset` counts from.

A record holds filled - start ids: the row's columns from `start` on. Where a row was cut or
replaced below its old end, its generation has grown. A negative start says that the row is empty
(filled is 0) and that its first -start cells are written, with zeros: rows given back in groups
whose kernels read a row's cells whatever its length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fused_slots.faults import INT32_MAX
from fused_slots.host.staging import StagedWrites
from fused_slots.layout import TableLayout


def pack_writes(writes: StagedWrites, layout: TableLayout, packet: npt.NDArray[np.int32]) -> int:
    """Fill a packet, and return the columns of its longest record.

    Args:
        writes: the merged writes of one step.
        layout: the manager's sizes.
        packet: int32, long enough for them.

    Raises:
        OverflowError: there are more columns than an int32 offset reaches.
        ValueError: the packet is too small.
    """
    if len(writes.column_ids) > INT32_MAX:
        raise OverflowError("more columns are staged than int32 offsets reach")
    num_rows, num_written = layout.max_num_reqs, len(writes.rows)
    lines_end = num_rows + 2 * num_written
    records_end = lines_end + 3 * writes.counts.size
    if len(packet) < records_end + len(writes.column_ids):
        raise ValueError("the packet is too small")
    packet[:num_rows] = -1
    packet[writes.rows] = np.arange(num_written, dtype=np.int32)
    packet[num_rows:lines_end:2] = writes.rows
    packet[num_rows + 1 : lines_end : 2] = writes.generations
    records = packet[lines_end:records_end].reshape(num_written, layout.num_groups, 3)
    records[:, :, 0] = writes.starts
    records[:, :, 1] = writes.filled
    records[:, :, 2] = writes.offsets
    packet[records_end : records_end + len(writes.column_ids)] = writes.column_ids
    return int(writes.counts.max(initial=0))


def unpack_writes(
    packet: npt.NDArray[np.int32], layout: TableLayout, num_written: int
) -> StagedWrites:
    """The merged writes that a packet holds, as views of it where their dtype is its own.

    Args:
        packet: int32, of exactly the length that they need.
        layout: the manager's sizes.
        num_written: the number of written rows (J).
    """
    lines_end = layout.max_num_reqs + 2 * num_written
    records_end = lines_end + 3 * num_written * layout.num_groups
    lines = packet[layout.max_num_reqs : lines_end].reshape(num_written, 2)
    records = packet[lines_end:records_end].reshape(num_written, layout.num_groups, 3)
    filled = records[:, :, 1]
    return StagedWrites(
        rows=lines[:, 0].astype(np.int64),
        filled=filled,
        counts=(filled - records[:, :, 0]).astype(np.int64),
        offsets=records[:, :, 2].astype(np.int64),
        column_ids=packet[records_end:],
        generations=lines[:, 1],
    )
