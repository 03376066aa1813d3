"""From sizes to a launch on Ascend, where a grid has one axis and few, fast, wide cores.

Every role of the kernels strides over its work, so a plan is free to take as many programs as the
device has cores and no more: each further program on a core pays its prologue again. Like any
plan it looks at sizes alone. Figures behind them: docs/evidence/ascend.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_slots.plan import ceil_div

SPAN = 512
"""Tokens that are mapped at once if they are a run (kernels/ascend/run.py)."""

SHORT_SHARE = 4
"""Tokens of short queries that are worth a program."""

TILE = 32
"""Tokens that are mapped at once, whatever they are."""

ENTRY_WEIGHT = 64
"""What an entry costs where queries are long, in tokens."""

SHORT_QUERY = 8
"""Mean query length up to which queries are short."""

PAD_TILE = 512
"""Slots that a padding program writes at a time."""

ENTRIES = 32
"""Batch entries that a program compares at a time."""

FEW = 8
"""Batch entries that are worth a gathering program where rows change."""

MAX_GRID = 65535
"""Programs of a launch that the runtime accepts."""

MAX_GROUPS = MAX_GRID // 4
"""KV cache groups for which each role can have a program."""


@dataclass(frozen=True)
class AscendPlan:
    """Programs of each role, for each group, and how they take tokens.

    Args:
        runs: queries are long on average, and an entry's next tokens are tried as a run.
        num_tiles: programs that map tokens.
        num_pad: programs that write PAD behind the last token; 0 = those that map tokens do.
        num_gather: programs that bring gathered tables up to date.
        num_write: programs that write staged rows.
    """

    runs: bool
    num_tiles: int = 0
    num_pad: int = 0
    num_gather: int = 0
    num_write: int = 0

    @property
    def programs(self) -> int:
        """Programs of one group."""
        return self.num_tiles + self.num_pad + self.num_gather + self.num_write

    @property
    def numbers(self) -> dict[str, int]:
        """The kernels' arguments of these names."""
        return {
            "num_tiles": self.num_tiles,
            "num_pad": self.num_pad,
            "num_gather": self.num_gather,
            "num_write": self.num_write,
        }

    def reason(self) -> str:
        """Why this plan and no other, in a sentence."""
        if self.runs:
            return f"queries are long on average: up to {SPAN} tokens of one request at a time"
        return f"queries are short on average: {self.num_tiles} programs share them evenly"


def are_long(num_reqs: int, num_tokens: int) -> bool:
    """Whether queries are long on average, in a batch of these sizes."""
    return num_tokens > SHORT_QUERY * num_reqs


def plan_launch(
    num_groups: int,
    num_cores: int,
    runs: bool,
    *,
    capacity: int = 0,
    num_reqs: int = 0,
    num_tokens: int = 0,
    num_entries: int = 0,
    num_written_rows: int = 0,
) -> AscendPlan:
    """Programs of each role.

    Args:
        num_groups: KV cache groups.
        num_cores: vector cores of the device.
        runs: queries are long on average.
        capacity: width of the slot mappings that are written, 0 = none are.
        num_reqs: batch entries.
        num_tokens: tokens that the caller expects; more or fewer may come and are mapped right.
        num_entries: batch entries to bring up to date.
        num_written_rows: rows with staged writes.
    """
    most = min(max(num_cores // max(num_groups, 1), 1), MAX_GRID // (4 * max(num_groups, 1)))

    def programs(pieces: int) -> int:
        return min(pieces, most)

    tokens = min(num_tokens, capacity)
    num_tiles, num_pad = 0, programs(ceil_div(capacity - tokens, PAD_TILE))
    if capacity:
        pieces = ceil_div(tokens, TILE)
        if runs:
            pieces = ceil_div(tokens + ENTRY_WEIGHT * max(num_reqs - 1, 0), SPAN)
        num_tiles = max(programs(pieces), 1)
    # A program beyond the cores pays its start on one of them. Where nothing is written gathering
    # programs compare and seldom copy: they get what tokens leave, or a quarter of the cores.
    left, part, pieces = most - num_tiles - num_pad, most // 4, ceil_div(num_entries, ENTRIES)
    if num_written_rows:
        part, pieces = most // 2, ceil_div(num_entries, FEW)
    num_gather = min(pieces, max(left, part, 1))
    num_write = min(num_written_rows, max(left - num_gather, most // 3, 1))
    room = most - num_pad - num_gather - num_write
    if capacity and runs and num_tiles <= 2 * room:
        num_tiles = min(num_tiles, room)
        if ENTRY_WEIGHT * num_reqs <= SPAN:  # Then whole runs, as many for each.
            pieces = ceil_div(tokens, SPAN)
            num_tiles = max(ceil_div(pieces, ceil_div(pieces, num_tiles)), 1) if pieces else 1
    elif capacity and not runs:
        num_tiles = max(num_tiles, min(ceil_div(tokens, SHORT_SHARE), room))
    return AscendPlan(
        runs=runs,
        num_tiles=num_tiles,
        num_pad=num_pad,
        num_gather=num_gather,
        num_write=num_write,
    )
