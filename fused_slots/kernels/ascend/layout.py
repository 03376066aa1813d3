"""Flags, sizes and the groups' lines of the Ascend kernels.

A kernel's compile-time choices travel as one int, FLAGS, and are asked for as `RING & FLAGS`, in
this order: the compiler's front end folds no other. lines_ptr is int32 [G, LINE_WIDTH]: a group's
line holds its numbers (kernels/layout.py), its fault counters, and what Ascend adds to the numbers,
each in 64 bytes of its own.
"""

import triton.language as tl

POW2 = tl.constexpr(1)
"""Every size that positions are divided by is a power of two, and divisors come as shifts."""
SHARDED = tl.constexpr(2)
"""Groups are sharded by context parallelism."""
RING = tl.constexpr(4)
"""A group is a ring."""
REPLAY = tl.constexpr(8)
"""Tokens may be replayed."""
FLAT = tl.constexpr(16)
"""Tokens are drafts: each names its row."""
RUNS = tl.constexpr(32)
"""Queries are long: SPAN tokens of an entry at a time are tried as a run (run.py)."""
STAGED = tl.constexpr(64)
"""The launch may write rows."""
WHOLE = tl.constexpr(128)
"""Rows are gathered whole, into tables of the caller."""
NULLS = tl.constexpr(256)
"""The manager has a null block, which is never written."""

TILE = tl.constexpr(32)
"""Tokens that are mapped at once, whatever they are."""
SPAN = tl.constexpr(512)
"""Tokens that are mapped at once if they are a run."""
SHORT_PIECE = tl.constexpr(8)
"""Tokens of one entry up to which they are not tried as one."""
ENTRY_WEIGHT = tl.constexpr(64)
"""What an entry costs, in tokens of a run."""
PAD_TILE = tl.constexpr(512)
"""Slots that a padding program writes at a time."""
ENTRIES = tl.constexpr(32)
"""Batch entries that a program compares at a time."""
COLUMNS = tl.constexpr(512)
"""Columns that a transfer of a gathering or writing program copies."""
WINDOW = tl.constexpr(64)
"""Columns that a tile within one row reads at once."""
ROWS = tl.constexpr(256)
"""Rows whose numbers a program holds on chip at a time."""

LINE_WIDTH = tl.constexpr(48)
FAULTS = tl.constexpr(16)
"""The counter of fault code c is FAULTS + c."""
INTERLEAVE = tl.constexpr(32)
"""I, consecutive tokens of one rank; behind it its shift."""
