"""The package's kernels, compiled for Ascend and executed through the public API: exact.

Here run the variants among which every two choices occur together; bench/verify_ascend.py runs
all of them, each with more cases.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from all_variants import KINDS, pairwise, variants_by_kind
from checked import CheckedVariant, faults_of, make
from compile import ASCEND_910B3, ASCEND_950
from hivm import Modes
from kernel_cases import OTHERS, POWERS, SETUPS, Batch, Setup, expected

from fused_slots import KVCacheGroup
from fused_slots.backends.launch import Variant
from fused_slots.plan_ascend import LONG_MAP

CASES = {ASCEND_910B3: 100, ASCEND_950: 40}
KIND_OF = {v: kind for kind, variants in variants_by_kind().items() for v in variants}
PAIRS = pairwise(KIND_OF)


@pytest.mark.parametrize("target", CASES)
@pytest.mark.parametrize("variant", PAIRS, ids=str)
def test_results_equal_the_oracles(variant: Variant, target: str) -> None:
    checked = CheckedVariant(KINDS[KIND_OF[variant]], target, variant)
    checked.run(CASES[target])
    assert checked.cases == CASES[target]


@pytest.mark.parametrize(
    "modes", [Modes(division_ulps=-1), Modes(division_ulps=1), Modes(flush_tail=False)], ids=str
)
@pytest.mark.parametrize("kind", ["others_ring_int32", "others_sharded_int32"])
def test_slots_do_not_depend_on_what_hardware_leaves_open(kind: str, modes: Modes) -> None:
    variants = [v for v in variants_by_kind()[kind] if v.kernel == "slots_on_ascend"]
    for variant in pairwise(variants)[:2]:
        CheckedVariant(KINDS[kind], ASCEND_910B3, variant, modes).run(20)


def long_rows() -> list[Variant]:
    """Variants of rows of 131,072 columns: short and long queries, slots alone and a step."""
    backend = make(SETUPS["long_rows"], ASCEND_910B3)._backend
    return [
        variant
        for variant in backend.variants()
        if (variant.index_dtype, variant.slot_dtype) == (torch.int32, torch.int64)
        and not dict(variant.constants).get("FLAT")
    ]


@pytest.mark.parametrize("variant", long_rows(), ids=str)
def test_rows_of_131072_columns(variant: Variant) -> None:
    cases = 200 if variant.kernel == "slots_on_ascend" else 30
    CheckedVariant(SETUPS["long_rows"], ASCEND_910B3, variant).run(cases)


@pytest.mark.parametrize("block_size", [4, 6])
def test_runs_of_more_columns_than_a_window_go_by_tiles(block_size: int) -> None:
    setup = Setup((KVCacheGroup(block_size, 256),))
    long = [
        variant
        for variant in make(setup, ASCEND_910B3)._backend.variants()
        if dict(variant.constants)["SPAN"] == LONG_MAP.span and variant.index_dtype is torch.int32
    ]
    for variant in long:
        CheckedVariant(setup, ASCEND_910B3, variant).run(40)


@pytest.mark.parametrize("groups", [POWERS, OTHERS], ids=["powers", "others"])
def test_rows_of_several_chunks(groups: tuple) -> None:
    """More rows than a program holds numbers of on chip: 600 of them, used at chunks' edges."""
    setup = Setup(groups, num_rows=600, capacity=64)
    tables = make(setup, ASCEND_910B3)
    used = [0, 1, 254, 255, 256, 257, 511, 512, 513, 599]
    rng = np.random.default_rng(0)
    filled: list[dict[int, list[int]]] = [{} for _ in groups]
    for case in range(12):
        for row in used if case == 0 else rng.choice(used, 3, replace=False).tolist():
            counts = [min(int(rng.integers(1, 5)), group.max_num_blocks) for group in groups]
            blocks = [rng.integers(0, 99, count).tolist() for count in counts]
            tables.append_block_ids(row, tuple(blocks), overwrite=True)
            for g, group in enumerate(groups):
                n = group.columns_per_block
                filled[g][row] = [i * n + c for i in blocks[g] for c in range(n)]
        index = rng.permutation(used)
        positions = rng.integers(0, 90, 3 * len(index))
        starts = np.arange(len(index) + 1, dtype=np.int32) * 3
        batch = Batch("decode", filled, index, starts, positions, None)
        arguments = [torch.from_numpy(a) for a in (index.astype(np.int32), starts, positions)]
        slots, faults = expected(setup, batch)
        gathered, in_step = tables.step(*arguments, num_tokens_padded=30)
        np.testing.assert_array_equal(in_step.numpy(), slots[:, :30])
        assert faults_of(tables) == faults
        alone = tables.compute_slot_mappings(*arguments, 30)
        np.testing.assert_array_equal(alone.numpy(), slots[:, :30])
        assert faults_of(tables) == faults
        for g, table in enumerate(gathered):
            for entry, row in enumerate(index.tolist()):
                ids = filled[g][row]
                assert table[entry, : len(ids)].tolist() == ids
                assert not table[entry, len(ids) :].any()
