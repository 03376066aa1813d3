"""bench.regress: noise is no regression, a slower step is one, and what is kept can be drawn."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import regress_gpu
from bench.history_picture import draw, load
from bench.regress import ROOT, SHORT_US, Side, expression, judge, regressions, table

NOISE = (0.97, 1.02, 1.0, 1.03, 0.99, 1.04)


def pairs(ratio: float, base: float = 100.0) -> list[tuple[float, float]]:
    return [(base, base * ratio * noise) for noise in NOISE]


@pytest.mark.parametrize("ratio", [0.96, 1.0, 1.05])
def test_noise_is_neither_slower_nor_faster(ratio: float) -> None:
    result = judge(pairs(ratio))
    assert (result["slower"], result["faster"]) == (False, False)


def test_all_pairs_above_the_threshold_are_slower_and_below_it_faster() -> None:
    assert judge(pairs(1.1))["slower"]
    assert judge(pairs(0.9))["faster"]
    assert not judge([(100.0, 200.0)] * 5 + [(100.0, 104.0)])["slower"], "one pair says no"


def test_short_benchmarks_have_a_threshold_of_their_own() -> None:
    assert not judge(pairs(1.1, SHORT_US - 1))["slower"]
    assert judge(pairs(1.1, SHORT_US))["slower"]
    assert judge(pairs(1.2, SHORT_US - 1))["slower"]


def test_five_pairs_or_fewer_judge_nothing() -> None:
    assert not judge([(100.0, 300.0)] * 5)["slower"]


class Told:
    """A side whose medians are told."""

    def __init__(self, name: str, medians: list[dict[str, float]]) -> None:
        self.name, self.medians, self.selected = name, medians, []

    def measure(
        self, options: argparse.Namespace, only: Sequence[str] | None = None
    ) -> dict[str, float]:
        self.selected.append(only)
        return self.medians[min(len(self.selected), len(self.medians)) - 1]


def test_what_is_found_slower_is_measured_once_more_alone() -> None:
    calm = {"bench_step[decode 8x4]": 100.0, "bench_apply[decode 8x4]": 50.0}
    slow = calm | {"bench_step[decode 8x4]": 120.0}
    options: Any = argparse.Namespace(pairs=6, select="not beside")
    base, still = Told("base", [calm]), Told("head", [slow])
    results = regressions((base, still), options)  # type: ignore[arg-type]
    assert [name for name, result in results.items() if result["slower"]] == [*slow][:1]
    assert still.selected == [None] * 6 + [["bench_step[decode 8x4]"]] * 6
    assert "SLOWER" in table(results)
    base, once = Told("base", [calm]), Told("head", [slow] * 6 + [calm])
    results = regressions((base, once), options)  # type: ignore[arg-type]
    assert not any(result["slower"] for result in results.values())


def test_suspects_are_named_to_pytest_by_their_words() -> None:
    names = ["bench_step[decode 8x4]", "bench_apply[spec 128x4]"]
    assert expression(names) == (
        "(bench_apply and spec and 128x4) or (bench_step and decode and 8x4)"
    )


def test_suspects_on_a_gpu_are_measured_alone_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["slots [decode 8x4]", "host slots [decode 8x4]"]
    ran: list[tuple[str, ...]] = []

    def run(side: Side, *words: str) -> str:
        ran.append(words)
        monkeypatch.setattr(sys, "argv", ["regress_gpu", *words[2:]])
        regress_gpu.main()
        return ""

    monkeypatch.setattr(Side, "_run", run)
    side = object.__new__(Side)
    side.name, side.folder = "head", tmp_path
    options = argparse.Namespace(gpu=True, device="cpu", select="")
    assert set(side.measure(options, names)) == set(names)
    assert ran[0][:2] == ("-m", "bench.regress_gpu")


def test_a_side_that_would_measure_another_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Side, "_run", lambda side, *words: f"{ROOT}/fused_slots/__init__.py native")
    with pytest.raises(SystemExit, match="would be measured instead of"):
        Side("base", tmp_path, ROOT)


def test_kept_results_are_drawn_in_their_order(tmp_path: Path) -> None:
    for day, ratio in (("02", 1.2), ("01", 1.0)):
        results = {"bench_step[decode 8x4]": judge(pairs(ratio))}
        run = {"date": f"2026-12-{day}T00:00:00", "head": f"head{day}", "results": results}
        (tmp_path / f"2026-12-{day}.json").write_text(json.dumps(run))
    runs = load(tmp_path)
    assert [run["head"] for run in runs] == ["head01", "head02"]
    draw(runs, tmp_path / "history.svg")
    text = (tmp_path / "history.svg").read_text()
    assert "head02" in text
    assert "decode 8x4" in text
    with pytest.raises(SystemExit, match="no run is kept"):
        draw([], tmp_path / "none.svg")
