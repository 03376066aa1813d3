"""The bench command: what it measures, how it ends, and what it shows meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import run_benchmarks
from fused_slots.cli import checkout, main
from tests.cli.calls import error_line, run_json


@pytest.fixture
def not_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-benchmark measures nothing where it sees pytest-xdist's mark."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.usefixtures("not_in_a_worker")
def test_bench_runs_one_benchmark_and_keeps_the_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "all.json"
    status, document = run_json(capsys, "bench", "--select", "append and 8x4", "--save", save)
    assert status == 0, document
    assert document["medians_us"]
    assert all("append" in row["name"] for row in document["medians_us"])
    assert json.loads(save.read_text())["benchmarks"]


@pytest.mark.parametrize("select", ["no_such_benchmark", "and and"])
def test_bench_that_selects_nothing_is_wrong_use(
    select: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(capsys, "bench", "--select", select)
    assert f"that matches a benchmark; got '{select}'" in line


@pytest.fixture(name="own_benchmarks")
def _own_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bench/ folder with one benchmark, which the test may write."""
    monkeypatch.setattr(run_benchmarks, "FOLDER", tmp_path / "bench")
    (tmp_path / "bench").mkdir()
    return tmp_path / "bench" / "bench_own.py"


@pytest.mark.usefixtures("not_in_a_worker")
def test_bench_shows_a_peer_measured_in_turns(
    own_benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_benchmarks.write_text(
        "def bench_own(benchmark):\n"
        "    benchmark.extra_info.update(ours_us=6.0, peer_us=4.0, ours_over_peer=1.5)\n"
        "    benchmark(int)\n"
        "def bench_alone(benchmark):\n"
        "    benchmark(int)\n"
    )
    assert main(["bench"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "bench: own (50%)\nbench: alone (100%)\n"
    alone, own = sorted(captured.out.splitlines())
    assert alone.startswith("alone ")
    assert own.endswith("in turns 6.0 and the peer's 4.0 us: 1.50")


def test_bench_with_a_wrong_result_is_a_finding(
    own_benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_benchmarks.write_text(
        "def bench_good(benchmark):\n    benchmark(int)\n"
        "def bench_wrong(benchmark):\n    raise AssertionError('slots differ')\n"
    )
    status, document = run_json(capsys, "bench")
    assert (status, document["good"]) == (1, False)
    assert "slots differ" in document["output"]


@pytest.mark.parametrize("argv", [["bench"], ["record", "preemption", "{tmp}/new.npz.xz"]])
def test_what_needs_a_checkout_tells_how(
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(checkout, "FOLDER", tmp_path / "bench")
    line = error_line(capsys, *(word.format(tmp=tmp_path) for word in argv))
    assert f"{argv[0]}: expected a source checkout" in line
    assert "make bench" in line


def test_bench_without_its_runner_tells_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_benchmarks, "find_spec", lambda name: None)
    assert "pip install pytest-benchmark" in error_line(capsys, "bench")
