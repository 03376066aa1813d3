"""What a launch looks like, and what a warm-up compiled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchPlan:
    """How one step is laid out on the device, chosen from sizes alone.

    Args:
        grid: programs per axis; the first is the KV cache group.
        variant: the compiled kernel that runs; empty where nothing is compiled.
        reason: why this plan and no other, in a sentence.
    """

    grid: tuple[int, int]
    variant: str
    reason: str

    def describe(self) -> str:
        """The plan in one line."""
        what = self.variant or "no compiled kernel"
        return f"grid {self.grid[0]} x {self.grid[1]}, {what}: {self.reason}"


@dataclass(frozen=True)
class WarmupReport:
    """The variants that a warm-up compiled, and the seconds it took."""

    variants: tuple[str, ...]
    seconds: float
