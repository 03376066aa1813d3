"""The packet of staged writes as GPU kernels read it (fused_slots/host/packet.py writes it).

int32: index [max_num_reqs] (the row's record, -1 = none), then num_rows lines [row, generation],
then [num_rows, G, 3] records [start, filled, first id], then ids.
"""

import triton
import triton.language as tl


@triton.jit
def staged_record(packet, row, live, filled, g, tables):
    """What this launch writes to each row of one group.

    Returns:
        The row's record (-1 = it is not written), its first written column, its filled columns
        after the launch, and the number of its first id among all ids.
    """
    record = tl.load(packet.ptr + row, mask=live & (packet.num_rows > 0), other=-1)
    written = record >= 0
    records_ptr = packet.ptr + tables.max_num_reqs + 2 * packet.num_rows
    fields_ptr = records_ptr + (tl.maximum(record, 0) * tables.num_groups + g) * 3
    start = tl.load(fields_ptr, mask=written, other=0)
    filled = tl.where(written, tl.load(fields_ptr + 1, mask=written, other=0), filled)
    first_id = tl.load(fields_ptr + 2, mask=written, other=0)
    return record, start, filled, first_id


@triton.jit
def staged_ids(packet, tables):
    """Where the packet's ids begin."""
    return packet.ptr + tables.max_num_reqs + (2 + 3 * tables.num_groups) * packet.num_rows
