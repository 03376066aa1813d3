"""Numbers that the host and all kernels share: the descriptor's fields, group kinds, faults.

The descriptor is int32 [G, DESCRIPTOR_WIDTH], one line a group: what a kernel must know of it. A
program reads its group's numbers from one cache line instead of taking an argument for each.
"""

import triton.language as tl

from fused_slots.faults import FAULT_DETAILS as DETAILS

DESCRIPTOR_WIDTH = tl.constexpr(16)
OFFSET_UNIT = tl.constexpr(64)

OFFSET = tl.constexpr(0)
"""First element of the group's table in the arena, in units of 64 int32."""
WIDTH = tl.constexpr(1)
"""Columns of a row, which is also its stride."""
COLUMN_SIZE = tl.constexpr(2)
"""B, tokens of one column."""
COLUMN_SHIFT = tl.constexpr(3)
VIRTUAL_SIZE = tl.constexpr(4)
"""K·S', tokens of one allocation block over all ranks that share the group."""
VIRTUAL_SHIFT = tl.constexpr(5)
SHARDS = tl.constexpr(6)
"""S', ranks that share the group."""
SHARDS_SHIFT = tl.constexpr(7)
RANK = tl.constexpr(8)
"""c', this rank's number among them."""
COLUMNS_PER_BLOCK = tl.constexpr(9)
"""n, columns of one allocation block."""
KIND = tl.constexpr(10)
"""KIND_STATE, KIND_RING or KIND_PAGED."""
CACHEABLE = tl.constexpr(11)
"""1 = replayed tokens are not written."""
REACH = tl.constexpr(12)
"""sliding_window_reach in tokens; 0 = no column is nulled."""
NULL_COLUMN = tl.constexpr(13)
"""The first of the null block's n columns; -n = there is no null block."""

KIND_STATE = tl.constexpr(0)
KIND_RING = tl.constexpr(1)
KIND_PAGED = tl.constexpr(2)

PAD = tl.constexpr(-1)
"""The slot of a token that must not be written."""
INT32_MAX = tl.constexpr(2147483647)

COLUMN_OUT_OF_ROW = tl.constexpr(1)
"""Fault codes, the lines of the fault counters [codes + 1, G] (fused_slots.FaultCode)."""
EMPTY_RING = tl.constexpr(2)
ROW_OUT_OF_RANGE = tl.constexpr(3)
TOKENS_OVER_CAPACITY = tl.constexpr(4)
NULL_BLOCK = tl.constexpr(5)
TOKENS_OVER_VIEW = tl.constexpr(6)
DUPLICATE_POSITION = tl.constexpr(7)

FAULT_DETAILS = tl.constexpr(DETAILS)
"""Faults that checked mode records one by one, behind a counter of all of them."""
DETAIL_WIDTH = tl.constexpr(5)
"""int64 numbers of one record: code, group, row, token, position."""
