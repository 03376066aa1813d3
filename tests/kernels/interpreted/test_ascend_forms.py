"""The kernels in their Ascend forms, interpreted, through whole lives of small managers."""

from __future__ import annotations

import pytest

from tests.kernels.ascend_forms import InterpretedAscend, simulate_lives_on


@pytest.mark.parametrize("first_seed", [0, 1000])
def test_interpreted_ascend_kernels_equal_the_oracles(first_seed: int) -> None:
    report = simulate_lives_on(InterpretedAscend, 5, 15, first_seed)
    assert report.steps == 75
    assert report.tokens_owned > 0
