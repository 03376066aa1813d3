"""Compiled samples, executed on the CPU, give what NumPy gives; on both families of devices."""

from __future__ import annotations

import numpy as np
import pytest
from compile import TARGETS, compile_variant
from hivm import Modes, execute
from sample_cases import CASES

SEEDS = range(5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_executed_sample_equals_numpy(name: str, target: str) -> None:
    kernel = compile_variant(CASES[name].variant, target)
    for seed in SEEDS:
        grid, arguments, expected = CASES[name].make(np.random.default_rng(seed))
        outputs = execute(kernel.module, grid, arguments, seed=seed).outputs
        for index, array in expected.items():
            np.testing.assert_array_equal(outputs[index], array, f"{name} seed {seed}")


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("name", ["corrected_divide"])
def test_corrected_division_is_exact_whatever_the_last_place(name: str, ulps: int) -> None:
    kernel = compile_variant(CASES[name].variant)
    for seed in SEEDS:
        grid, arguments, expected = CASES[name].make(np.random.default_rng(seed))
        outputs = execute(kernel.module, grid, arguments, modes=Modes(division_ulps=ulps)).outputs
        for index, array in expected.items():
            np.testing.assert_array_equal(outputs[index], array)


@pytest.mark.parametrize("modes", [Modes(flush_tail=False), Modes(saturate_int64=True)])
@pytest.mark.parametrize("name", CASES)
def test_samples_do_not_depend_on_what_hardware_leaves_open(name: str, modes: Modes) -> None:
    kernel = compile_variant(CASES[name].variant)
    grid, arguments, expected = CASES[name].make(np.random.default_rng(0))
    outputs = execute(kernel.module, grid, arguments, modes=modes).outputs
    for index, array in expected.items():
        np.testing.assert_array_equal(outputs[index], array)


def test_a_cast_from_int64_wraps_or_saturates_as_the_mode_says() -> None:
    kernel = compile_variant(CASES["widen"].variant)
    x, out = np.array([2**31, 2**32 + 3]), np.zeros(2, np.int64)
    wrapped = execute(kernel.module, (1,), [x, out, 2]).outputs[1]
    assert wrapped.tolist() == [1, 7]  # (-2**31 * 2 + 1, 3 * 2 + 1), in int32
    saturating = Modes(saturate_int64=True)
    assert execute(kernel.module, (1,), [x, out, 2], modes=saturating).outputs[1].tolist() == [
        -1,
        -1,
    ]
