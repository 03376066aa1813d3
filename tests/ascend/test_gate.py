"""Every variant that a plan can choose compiles, and costs no more than its budget.

Costs are held by `budgets.json`: a figure above its budget fails with the difference, and
`python -m pytest tests/ascend/test_gate.py --write-budgets -n 0` records new ones. Compiling for
Ascend 950 takes minutes, so its gate covers the setups with the most and the fewest features and
int32 row indices, unless `--all-variants` is given.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compile import ASCEND_910B3, ASCEND_950, CompiledKernel
from hivm_backend import executed_on
from kernel_cases import SETUPS, Setup

from fused_slots import AscendBlockTables
from fused_slots.backends.launch import Variant

BUDGETS = Path(__file__).with_name("budgets.json")
BUDGETED = (
    "ub_bytes",
    "scalar_loops",
    "locks",
    "discrete_loops",
    "gm_scalar_loads",
    "vector_calls",
    "dma_transfers",
    "scalar_ops",
)
UB_GOAL = 96 * 1024
UB_LIMIT = 192 * 1024

MANY_ROWS = {
    "1000_rows": Setup(SETUPS["replay"].groups, num_rows=1000),
    "2000_rows": Setup(SETUPS["replay"].groups, num_rows=2000),
    "1000_rows_other_sizes": Setup(SETUPS["other_sizes"].groups, num_rows=1000),
}
GATED = {**SETUPS, **MANY_ROWS}
_CASES = [(name, ASCEND_910B3) for name in GATED] + [
    (name, ASCEND_950) for name in ("replay", "sharded_other_sizes")
]


def compiled(name: str, target: str, everything: bool) -> dict[Variant, CompiledKernel]:
    """The variants of a setup; a CompileFailure names the one at fault."""
    with executed_on(target):
        tables: AscendBlockTables = GATED[name].make()
    backend = tables._backend
    for variant in backend.variants():
        if everything or target == ASCEND_910B3 or variant.index_dtype is torch.int32:
            backend._bound(variant)
    return backend.launcher.kernels


@pytest.mark.parametrize(("name", "target"), _CASES)
def test_every_variant_compiles_within_its_budget(
    name: str, target: str, request: pytest.FixtureRequest
) -> None:
    kernels = compiled(name, target, request.config.getoption("--all-variants"))
    assert len(kernels) >= 9
    costs = {
        str(variant): {figure: kernel.cost.as_dict()[figure] for figure in BUDGETED}
        for variant, kernel in kernels.items()
    }
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    if request.config.getoption("--write-budgets"):
        budgets.setdefault(target, {}).update(costs)
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
        return
    of_target = budgets[target]
    above = {
        f"{variant} {figure}": f"{value}, budget {of_target.get(variant, {}).get(figure)}"
        for variant, figures in costs.items()
        for figure, value in figures.items()
        if value > of_target.get(variant, {}).get(figure, -1)
    }
    assert above == {}


def test_budgets_keep_the_rules() -> None:
    """No lock, no overflow; scalar loops and more than the goal of UB only where they are known.

    The loops stand in a branch that is taken by positions from 2^31 - 1 on alone, in sharded
    groups whose sizes are no powers of two. Steps over more than 512 rows hold their lengths,
    starts and generations on chip.
    """
    budgets = json.loads(BUDGETS.read_text())
    assert set(budgets) == {ASCEND_910B3, ASCEND_950}
    for target, variants in budgets.items():
        for variant, cost in variants.items():
            where = f"{variant} for {target}"
            assert cost["locks"] == 0, where
            if "pow2" in variant or "sharded" not in variant:
                assert cost["scalar_loops"] == 0, where
            many_rows = variant.startswith("step_on_ascend") and "rows1024" in variant
            assert cost["ub_bytes"] <= (UB_LIMIT if many_rows else UB_GOAL), where
