"""The packet of staged writes as kernels read it (fused_slots/host/packet.py).

int32: index [max_num_reqs] (the row's record, -1 = none), then num_written_rows lines [row,
generation], then [num_written_rows, G, 3] records [start, filled, first id], then ids.
"""

import triton
import triton.language as tl


@triton.jit
def staged_record(packet_ptr, num_written_rows, row, live, filled, g, num_groups, max_num_reqs):
    """What this launch writes to each row of one group.

    Returns:
        The row's record (-1 = it is not written), its first written column, its filled columns
        after the launch, and the place of its first id among all ids.
    """
    record = tl.load(packet_ptr + row, mask=live & (num_written_rows > 0), other=-1)
    written = record >= 0
    records_ptr = packet_ptr + max_num_reqs + 2 * num_written_rows
    fields_ptr = records_ptr + (tl.maximum(record, 0) * num_groups + g) * 3
    start = tl.load(fields_ptr, mask=written, other=0)
    filled = tl.where(written, tl.load(fields_ptr + 1, mask=written, other=0), filled)
    first_id = tl.load(fields_ptr + 2, mask=written, other=0)
    return record, start, filled, first_id


@triton.jit
def staged_ids(packet_ptr, num_written_rows, num_groups, max_num_reqs):
    """Where the packet's ids begin."""
    return packet_ptr + max_num_reqs + (2 + 3 * num_groups) * num_written_rows
