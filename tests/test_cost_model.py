"""The cost model: its factors are those of the measured sweeps, and its numbers add up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fit_cost_model import compared, fitted, swept
from fused_slots.cli import main
from fused_slots.cost_model import (
    ERRORS,
    FACTORS,
    TERMS,
    Load,
    cost,
    int32_requests,
    microseconds,
    outside,
)
from fused_slots.faults import ConfigurationError
from tests.cli.calls import error_line, run_json

PAGE = Path(__file__).parents[1] / "docs" / "cost_model.md"
SMALL = Load(256, (16, 32), 8192, 8192)


def test_factors_and_errors_are_those_of_the_fit() -> None:
    factors, errors = fitted()
    assert set(factors) == set(FACTORS) == set(TERMS)
    for quantity, of in factors.items():
        assert of == pytest.approx(FACTORS[quantity], abs=2e-4)
        assert errors[quantity] == pytest.approx(ERRORS[quantity], abs=0.011)


def test_every_swept_point_lies_within_the_stated_error() -> None:
    for quantity in ("slots", "step", "whole", "host"):
        points = swept(quantity)
        assert len(points) > 10
        for load, measured in points:
            off = abs(microseconds(quantity, load) / measured - 1)
            assert off <= ERRORS[quantity][0] + 0.006, (quantity, load)


def test_held_out_workloads_are_no_points_of_the_fit() -> None:
    assert not {value for _, value in swept("slots")} & {
        value for _, value in compared("cuda_compare_triton_3.8.0", "slots")
    }


def test_the_page_states_the_errors() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) % \| (\d+) % \|$", PAGE.read_text(), re.MULTILINE)
    stated = [(int(fit), int(held)) for _, fit, held in rows]
    assert stated == [(round(100 * a), round(100 * b)) for a, b in ERRORS.values()]


def test_more_of_anything_never_costs_less() -> None:
    for more in (
        Load(512, (16, 32), 8192, 8192),
        Load(256, (16, 32, 16), 8192, 8192),
        Load(256, (16, 32), 16384, 8192),
        Load(256, (16, 32), 8192, 8192, tokens=4),
        Load(256, (16, 32), 8192, 16384),
    ):
        for quantity in TERMS:
            assert microseconds(quantity, more) >= microseconds(quantity, SMALL)
        assert cost(more)["memory_bytes"]["total"] >= cost(SMALL)["memory_bytes"]["total"]
    assert cost(Load(256, (16, 32), 16384, 8192))["memory_bytes"]["total"] > 8 * 256 * 1024


def test_int32_limits_by_hand() -> None:
    """A request has 512 blocks of 16 tokens and 256 of 32, and block 0 is nobody's."""
    limits = cost(SMALL)["int32_requests"]
    assert limits == {"pool_per_group": 262_143, "one_pool": (2**31 // 32 - 1) // 768}


@pytest.mark.parametrize("sizes", [(16, 32), (64,), (16, 16, 256)])
def test_int32_limits_are_those_at_which_a_manager_refuses_its_pool(sizes: tuple[int, ...]) -> None:
    load = Load(1, sizes, 1024, 8192, slot_bytes=4)
    own, shared = int32_requests(load)
    for requests, blocks_of in (
        (own, [group.max_num_blocks for group in load.groups]),
        (shared, [load.columns] * len(sizes)),
    ):
        fits, more = ([(requests + n) * blocks + 1 for blocks in blocks_of] for n in (0, 1))
        replace(load.layout, num_blocks=tuple(fits))
        with pytest.raises(ConfigurationError, match="num_blocks of group"):
            replace(load.layout, num_blocks=tuple(more))


def test_what_is_extrapolated_is_said() -> None:
    assert outside(SMALL) == []
    (line,) = outside(Load(5000, (16,), 8192, 8192))
    assert "requests 5,000, measured were 1 to 4,096" in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((256, (16,), 8192, 100), "at least 256"),
        ((0, (16,), 8192, 100), "requests"),
        ((1, (), 8192, 100), "one group or more"),
        ((1, (0,), 8192, 100), "block_size"),
    ],
)
def test_impossible_loads_are_refused(arguments: tuple[object, ...], part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        Load(*arguments)  # type: ignore[arg-type]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--requests", "256", "--context", "8192", "--block-size", "16,32"]
    status, document = run_json(capsys, *asked)
    assert status == 0
    assert {key: document[key] for key in cost(SMALL)} == cost(SMALL)
    _, repeated = run_json(capsys, *asked, "--groups", "4")
    assert list(repeated["load"]["block_sizes"]) == [16, 32, 16, 32]
    assert "at most 1 sizes" in error_line(capsys, *asked, "--groups", "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--groups", "0"], "--groups: expected an int in [1, 4096]; got 0"),
        (["--groups", "100000000"], "--groups: expected an int in [1, 4096]; got 100000000"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens: expected an int in [1, "),
        (["--requests", "300", "--max-num-batched-tokens", "299"], "expected at least 300"),
        (["--context", "-1"], "context: expected an int in [1, "),
        (["--tokens", "0"], "tokens: expected an int in [1, "),
        (["--ranks", "0"], "ranks: expected an int in [1, "),
        (["--block-size", "16,0"], "block_size: expected an int in [1, "),
        (["--requests", "99999999999"], "requests: expected an int in [1, 2147483647]"),
    ],
)
def test_wrong_numbers_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(capsys, "plan", "--requests", "256", "--context", "8192", *argv)
    assert line.startswith("fused-slots plan: ")
    assert message in line


def test_one_of_a_thing_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--requests", "1", "--context", "8192"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("1 request x 1 group, context 8,192, 1 token a request and ")
    assert captured.err == ""
