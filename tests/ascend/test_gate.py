"""Every variant that a plan can choose compiles, within the rules, and costs what is recorded.

Costs are held by `budgets.json`: a figure that moved, up or down, fails with the difference, and
`python -m pytest tests/ascend/test_gate.py --write-budgets -n 0` records new ones. Of rare kinds,
and for Ascend 950, which compiles ten times as slowly, it takes the variants among which every two
choices occur together, unless `--all-variants` is given; bench/verify_ascend.py takes all. An A3
has more cores than a 910B3 and the same code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from all_variants import KINDS, RARE, pairwise, variants_by_kind
from compile import ASCEND_910B3, ASCEND_950, ASCEND_A3, CORES
from hivm_backend import executed_on

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
    "library_waits",
)
RULES = {
    "ub_bytes": 96 * 1024,
    "scalar_loops": 0,
    "locks": 0,
    "library_loops_in_tile_loops": 0,
    "library_events": 0,
    "left_padded_loads": 0,
}
"""What no variant may be above."""

VARIANTS = variants_by_kind()
ALL = [variant for variants in VARIANTS.values() for variant in variants]
PAIRS = pairwise(ALL)


@pytest.mark.parametrize("target", [ASCEND_910B3, ASCEND_950])
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_compiles_within_its_budget(
    kind: str, target: str, request: pytest.FixtureRequest
) -> None:
    everything = request.config.getoption("--all-variants")
    everything = everything or (target == ASCEND_910B3 and kind not in RARE)
    wanted = [variant for variant in VARIANTS[kind] if everything or variant in PAIRS]
    with executed_on(target):
        backend = KINDS[kind].make()._backend
    for variant in wanted:
        backend._bound(variant)
    costs = {
        str(variant): {figure: kernel.figures[figure] for figure in BUDGETED}
        for variant, kernel in backend.launcher.kernels.items()
    }
    assert len(costs) == len(wanted)
    for figure, most in RULES.items():
        broken = {str(v) for v, k in backend.launcher.kernels.items() if k.figures[figure] > most}
        assert broken == set(), figure
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    if request.config.getoption("--write-budgets"):
        of_target = budgets.get(target, {}) | costs
        budgets[target] = {name: of_target[name] for name in map(str, ALL) if name in of_target}
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
        return
    of_target = budgets[target]
    moved = {
        f"{variant} {figure}": f"{of_target.get(variant, {}).get(figure)} -> {value}"
        for variant, figures in costs.items()
        for figure, value in figures.items()
        if value != of_target.get(variant, {}).get(figure)
    }
    assert moved == {}, "make record-counts-ascend, if it is meant"


def test_every_variant_has_a_budget_and_every_budget_a_variant() -> None:
    budgets = json.loads(BUDGETS.read_text())
    names = {str(variant) for variant in ALL}
    assert len(names) == len(ALL) == 332
    chosen = {str(variant) for variant in PAIRS}
    usual = {str(v) for kind, variants in VARIANTS.items() if kind not in RARE for v in variants}
    assert len(usual) == 220
    assert set(budgets) == {ASCEND_910B3, ASCEND_950}
    assert usual | chosen <= set(budgets[ASCEND_910B3]) <= names
    assert chosen <= set(budgets[ASCEND_950]) <= names


@pytest.mark.parametrize("figure", sorted({*RULES} & {*BUDGETED}))
def test_budgets_keep_the_rules(figure: str) -> None:
    for target, variants in json.loads(BUDGETS.read_text()).items():
        for variant, cost in variants.items():
            assert cost[figure] <= RULES[figure], f"{variant} for {target}"


@pytest.mark.parametrize("kind", KINDS)
def test_code_for_an_a3_is_a_910b3s(kind: str) -> None:
    """An A3 differs in its number of cores alone; what is checked of a 910B3's code holds there."""
    chosen = [variant for variant in VARIANTS[kind] if variant in PAIRS]
    texts = []
    for target in (ASCEND_910B3, ASCEND_A3):
        with executed_on(target):
            backend = KINDS[kind].make()._backend
        for variant in chosen:
            backend._bound(variant)
        kernels = [backend.launcher.kernels[variant] for variant in chosen]
        assert {kernel.module.vector_cores for kernel in kernels} <= {CORES[target]}
        texts.append([re.sub(r'"\w+_CORE_COUNT", \d+', "", kernel.hivm) for kernel in kernels])
    assert texts[0] == texts[1]


def test_chosen_variants_hold_every_two_choices_that_occur_together() -> None:
    assert len(PAIRS) < len(ALL) / 5
    for kernel in {variant.kernel for variant in ALL}:
        of_kernel = [dict(v.constants) for v in ALL if v.kernel == kernel]
        chosen = [dict(v.constants) for v in PAIRS if v.kernel == kernel]
        for one in of_kernel[0]:
            for two in of_kernel[0]:
                occurring = {(constants[one], constants[two]) for constants in of_kernel}
                assert {(constants[one], constants[two]) for constants in chosen} == occurring
