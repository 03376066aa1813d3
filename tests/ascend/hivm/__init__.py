"""Reads and executes the final HIVM text of bishengir-compile on a CPU.

One seam: `execute(parse(text), grid, arguments) -> Execution` with the counts of every program;
`cost_report(parse(text))` is the static side. See docs/ascend.md for what each figure means.
"""

from .cost import CostReport, cost_report
from .execute import Alias, Execution, Pointers, execute, fold_on_cores
from .memory import (
    FlagImbalance,
    HivmFault,
    OutOfBounds,
    Race,
    UninitialisedRead,
    UnsupportedOperation,
)
from .modes import EXACT, Modes
from .parser import Module, parse

__all__ = [
    "EXACT",
    "Alias",
    "CostReport",
    "Execution",
    "FlagImbalance",
    "HivmFault",
    "Modes",
    "Module",
    "OutOfBounds",
    "Pointers",
    "Race",
    "UninitialisedRead",
    "UnsupportedOperation",
    "cost_report",
    "execute",
    "fold_on_cores",
    "parse",
]
