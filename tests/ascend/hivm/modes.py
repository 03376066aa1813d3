"""The numeric behaviour that hardware documents leave open, as switches.

A kernel that is right only under one of them is not right: tests run it under several.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Modes:
    """How the executed vector unit rounds.

    `division_ulps`: error added to every float32 quotient, in units of its last place; the 910B's
    vdiv is documented as correctly rounded (0). `flush_tail`: a transfer into UB that ends inside
    a 32-byte block fills the block's rest with the padding value, as the library sets it up; off
    leaves the rest as it was. `saturate_int64`: int64 -> int32 saturates instead of wrapping.
    """

    division_ulps: int = 0
    flush_tail: bool = True
    saturate_int64: bool = False

    def divide(self, numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            quotient = np.divide(numerator, denominator, dtype=np.float32)
            for _ in range(abs(self.division_ulps)):
                toward = np.float32(np.inf if self.division_ulps > 0 else -np.inf)
                quotient = np.where(quotient == 0, quotient, np.nextafter(quotient, toward))
        return quotient.astype(np.float32)

    def to_int32(self, values: np.ndarray) -> np.ndarray:
        if self.saturate_int64:
            values = np.clip(values, -(2**31), 2**31 - 1)
        return values.astype(np.int64).astype(np.int32)


EXACT = Modes()


def round_to_int32(values: np.ndarray, mode: int) -> np.ndarray:
    """float32 -> int32 with a hivm round mode, saturating as the vector unit does."""
    rounding = {0: np.rint, 2: np.floor, 3: np.ceil, 4: np.trunc, 6: np.trunc}
    wide = rounding[mode](values.astype(np.float64))
    return np.clip(np.nan_to_num(wide), -(2**31), 2**31 - 1).astype(np.int32)
