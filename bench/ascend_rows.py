"""Batches that Ascend kernels are modelled, timed and compared on."""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT = 8192
"""Tokens that each row has blocks for, on every rank."""
INTERLEAVE = 16
"""Consecutive tokens on a rank."""
FOUR = [16, 32, 64, 128]
SIX = [16, 32, 64, 128, 16, 32]


@dataclass(frozen=True)
class Row:
    """Query lengths, first positions, block sizes of the groups; ranks of context parallelism."""

    lengths: list[int]
    first: list[int]
    sizes: list[int]
    ranks: int = 1

    @property
    def capacity(self) -> int:
        """Tokens that slot mappings are wide enough for."""
        return max(sum(self.lengths), 256)


def _late(number: int) -> list[int]:
    """First positions near the context's end."""
    return [8000 - 100 * (i % 13) for i in range(number)]


ROWS: dict[str, Row] = {
    "decode 256": Row([1] * 256, _late(256), FOUR),
    "MTP 64 x 4": Row([4] * 64, _late(64), FOUR),
    "prefill 4096": Row([4096], [0], FOUR),
    "63 + 2048": Row([1] * 63 + [2048], [*_late(63), 4000], FOUR),
    "six groups, 1 x 4096": Row([4096], [0], SIX),
    "8 x 1024": Row([1024] * 8, [256 * i for i in range(8)], FOUR),
    "twelve groups, 1 x 8192": Row([8192], [0], SIX * 2),
    "32 x 128": Row([128] * 32, [64 * i for i in range(32)], FOUR),
    "twelve groups, 4 decodes": Row([1] * 4, [8000, 7000, 500, 4000], SIX * 2),
    "context parallel 4, decode 64": Row([1] * 64, _late(64), FOUR, ranks=4),
    "context parallel 4, 1 x 4096": Row([4096], [0], FOUR, ranks=4),
}
