"""From sizes to a launch on Ascend, where a grid has one axis and few, fast, wide cores.

Every role of the kernels strides over its work, so a plan is free to take as many programs as the
device has cores and no more: each further program on a core pays its prologue again. Like any
plan it looks at sizes alone. Figures behind them: docs/evidence/ascend.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fused_slots.plan import ceil_div

SPAN_TILES = 4
"""Tiles of a span that is tried as a run (kernels/ascend/run.py)."""


class Tiles(NamedTuple):
    """How programs take tokens: `tile` at a time, and more where they form a run, if `runs`."""

    tile: int
    runs: bool = False

    @property
    def span(self) -> int:
        """Tokens that a program takes at a time."""
        return self.tile * SPAN_TILES if self.runs else self.tile


SHORT = Tiles(32)
"""Where queries are short (decode, speculation): rows differ within a tile."""

LONG_MAP = Tiles(128, runs=True)
"""Elsewhere, where slots are all that a launch makes: a span is mostly a run of one request. Larger
tiles do more at a time but need more on-chip memory."""

LONG_STEP = Tiles(64, runs=True)
"""The same in a whole step, whose other roles need on-chip memory, too."""

SHORT_QUERY = 8
"""Mean query length up to which tiles are short."""

PAD_TILE = 512
"""Slots that a padding program writes at a time."""

ENTRIES = 32
"""Batch entries that a gathering program compares at a time."""

MAX_GRID = 65535
"""Programs of a launch that the runtime accepts."""

MAX_GROUPS = MAX_GRID // 4
"""KV cache groups for which each role can have a program."""


@dataclass(frozen=True)
class AscendPlan:
    """Programs of each role, for each group, and the tile of tokens.

    Args:
        tiles: tokens that a program takes at a time.
        num_tiles: programs that map tokens.
        num_pad: programs that write PAD behind the last token; 0 = those that map tokens do.
        num_gather: programs that bring gathered tables up to date.
        num_write: programs that write staged rows.
        search_steps: steps of the search for a token's request.
    """

    tiles: Tiles
    num_tiles: int = 0
    num_pad: int = 0
    num_gather: int = 0
    num_write: int = 0
    search_steps: int = 0

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
            "search_steps": self.search_steps,
        }

    def reason(self) -> str:
        """Why this plan and no other, in a sentence."""
        span = self.tiles.span
        if self.tiles == SHORT:
            return f"queries are short on average: {span} tokens of many requests at a time"
        return f"queries are long on average: {span} tokens at a time, mostly of one request"


def choose_tiles(num_reqs: int, num_tokens: int, long: Tiles) -> Tiles:
    """How programs take the tokens of a batch of these sizes."""
    return SHORT if num_tokens <= SHORT_QUERY * num_reqs else long


def without_runs(tiles: Tiles) -> Tiles:
    """The same under context parallelism, where a rank's slots are not in runs."""
    return Tiles(tiles.tile)


def plan_launch(
    num_groups: int,
    num_cores: int,
    tiles: Tiles,
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
        tiles: tokens that a program takes at a time.
        capacity: width of the slot mappings that are written, 0 = none are.
        num_reqs: batch entries.
        num_tokens: tokens that the caller expects; more or fewer may come and are mapped right.
        num_entries: batch entries to bring up to date.
        num_written_rows: rows with staged writes.
    """
    most = min(max(num_cores // max(num_groups, 1), 1), MAX_GRID // (4 * max(num_groups, 1)))

    def programs(pieces: int) -> int:
        return min(pieces, most)

    num_gather, num_write = programs(ceil_div(num_entries, ENTRIES)), programs(num_written_rows)
    num_tiles = num_pad = 0
    if capacity:
        tokens = min(num_tokens, capacity)
        num_tiles = max(programs(ceil_div(tokens, tiles.span)), 1)
        num_pad = programs(ceil_div(capacity - tokens, PAD_TILE))
        # A program beyond the cores pays its start on one of them, which is more than a run costs.
        room = most - num_pad - num_gather - num_write
        if tiles.runs and num_tiles <= 2 * room:
            num_tiles = min(num_tiles, room)
    return AscendPlan(
        tiles=tiles,
        num_tiles=num_tiles,
        num_pad=num_pad,
        num_gather=num_gather,
        num_write=num_write,
        search_steps=max(num_reqs - 1, 0).bit_length(),
    )
