"""Whole lives of small managers on executed Ascend code: every call, every kind of group."""

from __future__ import annotations

import pytest
from hivm_backend import HivmBackend

from tests.kernels.ascend_forms import simulate_lives_on


@pytest.mark.parametrize("first_seed", [0, 500, 1000, 1500])
def test_lives_on_executed_code_equal_the_oracles(first_seed: int) -> None:
    report = simulate_lives_on(HivmBackend, 2, 25, first_seed)
    assert report.steps == 50
    assert report.tokens_owned > 0
