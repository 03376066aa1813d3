"""Scripts of bench/ run: imports, help, dry runs where a GPU is needed, pictures of the results."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import beside_vllm, cuda_sweep, sweep_pictures
from bench.beside_vllm import Comparison
from bench.sweep_pictures import PICTURES, RESULT, digest, digest_in, draw
from bench.vllm_engine_throughput import median_interval, summary

SCRIPTS = sorted(path.stem for path in Path(cuda_sweep.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_imports_and_every_command_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        module = import_module(f"bench.{name}")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        pytest.skip("needs vllm")
    assert module.__doc__
    if hasattr(module, "main"):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as stopped:
            module.main()
        assert stopped.value.code == 0
        assert "usage:" in capsys.readouterr().out


def dry_sweep(monkeypatch: pytest.MonkeyPatch, path: Path) -> dict[str, object]:
    sizes = ["--requests", "1", "3", "--groups", "1", "2", "--contexts"]
    monkeypatch.setattr(cuda_sweep, "FIXED_CONTEXT", 300)
    monkeypatch.setattr(cuda_sweep, "FIXED_REQUESTS", 4)
    monkeypatch.setattr(sys, "argv", ["sweep", "--device", "cpu", "--json", str(path), *sizes])
    cuda_sweep.main()
    report: dict[str, object] = json.loads(path.read_text())
    return report


def test_a_dry_sweep_measures_every_point_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = dry_sweep(monkeypatch, tmp_path / "sweep.json")
    assert str(report["card"]).startswith("dry run")
    sweeps = report["sweeps"]
    assert isinstance(sweeps, dict)
    assert [(p["requests"], p["groups"]) for p in sweeps["requests"]] == [(1, 6), (3, 6)]
    assert [(p["requests"], p["groups"]) for p in sweeps["groups"]] == [(4, 1), (4, 2)]
    for point in sweeps["requests"] + sweeps["groups"]:
        for what in ("slots", "steady", "whole", "host"):
            assert point[what]["ours"]["median"] > 0
            assert point[what]["vllm"]["median"] > 0
    for name in ("requests", "groups"):
        path = tmp_path / f"{name}.svg"
        draw(report, name, path)
        assert digest_in(path) == digest(report, name)
    assert digest(report, "requests") != digest(report, "groups")
    other = json.loads(json.dumps(report))
    other["sweeps"]["requests"][0]["whole"]["ours"]["median"] += 1
    assert digest(other, "requests") != digest(report, "requests")


def test_nothing_is_timed_when_the_two_sides_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    make_load = partial(cuda_sweep.decode, 3, 2, 300)

    def one_block_off(side: beside_vllm.Ours, load: object, device: str) -> None:
        original(side, load, device)
        if sides:
            side.tables.block_tables[1].gpu[:, 2] += 1
        sides.append(side)

    original, sides = beside_vllm.Ours.__init__, []
    monkeypatch.setattr(beside_vllm.Ours, "__init__", one_block_off)
    with pytest.raises(SystemExit, match="gathered tables of group 1 differ"):
        Comparison(make_load, "cpu")


def test_pictures_in_the_docs_show_the_committed_sweep() -> None:
    report = json.loads(RESULT.read_text())
    assert not report["card"].startswith("dry run")
    measured = {name for name, points in report["sweeps"].items() if points}
    assert measured
    pictures = {path.stem.removeprefix("sweep_"): path for path in PICTURES.glob("sweep_*.svg")}
    assert set(pictures) == measured
    for name, path in pictures.items():
        assert digest_in(path) == digest(report, name), f"run {sweep_pictures.__name__}: {name}"
        assert path.stat().st_size < 100_000


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    values = [float(value) for value in range(1, 21)]
    assert median_interval(values[::-1]) == (6.0, 15.0)  # 95.9% for 20 values
    assert median_interval(values[:6]) == (1.0, 6.0)  # 96.9%
    assert median_interval(values[:5]) is None  # five values reach 93.8%


def test_a_difference_is_one_only_where_the_interval_leaves_zero_out() -> None:
    result: dict[str, Any] = {"mode": "eager", "batch": 1, "tokens_equal": 20}
    noise = [{"stock": 100.0, "plugin": 100.0 + (-1) ** i} for i in range(20)]
    assert "no difference; tokens equal in 20" in summary(result | {"pairs": noise})
    gain = [{"stock": 100.0, "plugin": 102.0 + i / 10} for i in range(20)]
    assert "+2.50 to +3.40%: a difference" in summary(result | {"pairs": gain})
    assert "too few pairs" in summary(result | {"pairs": gain[:3]})
