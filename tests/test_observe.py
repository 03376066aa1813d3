"""Metrics, NVTX ranges, log lines: what is there when asked for, and nothing when not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup, logs, observe
from fused_slots.observe import CALLS, process_rank, say_at_exit

ROOT = Path(__file__).parents[1]


def build() -> AscendBlockTables:
    groups = [KVCacheGroup(4, 8, name='a "group"'), KVCacheGroup(4, 1, circular=True)]
    return AscendBlockTables.from_groups(groups, max_num_reqs=2, max_num_batched_tokens=8)


def one_step(tables: AscendBlockTables) -> None:
    starts = torch.tensor([0, 1], dtype=torch.int32)
    tables.step(torch.zeros(1, dtype=torch.int32), starts, torch.tensor([3]))


def test_nothing_stands_before_the_backend_unless_asked_for() -> None:
    assert not set(CALLS) & vars(build()._backend).keys()
    loaded = "import sys, fused_slots.block_tables; print('fused_slots.observe' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_file_of_metrics_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_METRICS", "1000")
    monkeypatch.setenv("FUSED_SLOTS_METRICS_DIR", str(tmp_path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv("RANK", "2")
    first, second = build(), build()
    second.append_block_ids(0, ([1], [1]), True)
    clock = 0.0
    monkeypatch.setattr(observe.time, "monotonic", lambda: clock)
    for tables in (first, second, first):
        one_step(tables)  # the third is within the interval
    clock = 1e9
    for tables in (first, second, first):
        one_step(tables)
    (path,) = tmp_path.iterdir()
    assert path.name == f"fused_slots-rank2-pid{os.getpid()}.prom"
    lines = path.read_text().splitlines()
    found = [line for line in lines if line.startswith("fused_slots_launches_total")]
    assert [line.rsplit(" ", 1)[1] for line in found] == ["2", "1"]
    faults = [line for line in lines if line.startswith("fused_slots_faults_total{")]
    assert len(faults) == 2, "the second manager has none"
    assert 'rank="2",manager="' in faults[0]
    assert faults[0].endswith('code="column_out_of_row",group="a \\"group\\""} 2')
    assert "# TYPE fused_slots_rows gauge" in lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    in_order = [line.split("{")[0] for line in lines if not line.startswith("#")]
    assert list(dict.fromkeys(in_order)) == families


@pytest.mark.parametrize("folder", ["", "missing"])
def test_without_a_folder_there_is_a_line_in_the_log(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_METRICS", "1")
    monkeypatch.setenv("FUSED_SLOTS_METRICS_DIR", folder and str(tmp_path / folder))
    tables = build()
    one_step(tables)
    assert "FUSED_SLOTS_METRICS_DIR is no folder" in caplog.text
    assert not list(tmp_path.iterdir())


def test_metrics_that_fail_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("FUSED_SLOTS_METRICS", "1")
    monkeypatch.setenv("FUSED_SLOTS_METRICS_DIR", str(tmp_path / "gone"))
    tables = build()
    (tmp_path / "gone").rmdir()
    one_step(tables)
    assert "No metrics: FileNotFoundError" in caplog.text
    assert tables.launches == 1


def test_a_range_around_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    monkeypatch.setenv("FUSED_SLOTS_NVTX", "1")
    tables = build()
    ranges.clear()
    one_step(tables)
    tables.map_tokens(torch.tensor([0]), torch.tensor([0]))
    assert ranges == ["fused_slots.step", "end", "fused_slots.map_tokens", "end"]


def test_where_torch_has_no_ranges_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", refuse)
    monkeypatch.setenv("FUSED_SLOTS_NVTX", "1")
    one_step(build())
    assert "No NVTX ranges: NVTX functions not installed" in caplog.text


def test_the_last_line_of_a_process_says_what_its_tables_did() -> None:
    script = (
        "import logging, multiprocessing, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from tests.test_observe import build, one_step, say_at_exit\n"
        "def work():\n"
        "    global tables\n"
        "    tables, gone = build(), build()\n"
        "    say_at_exit(tables), say_at_exit(gone), one_step(tables)\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(), child.join()\n"
        "print('child', child.exitcode, flush=True)\n"
        "work()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    child, code, parent = done.stdout.splitlines()
    assert code == "child 0"
    assert child == parent
    assert child.startswith("INFO:fused_slots:fused_slots: rank 0: 1 steps, 1 launches, 0 appends")


def test_the_metrics_of_a_process_that_has_ended_are_its_last(tmp_path: Path) -> None:
    script = (
        "from tests.test_observe import build, one_step\n"
        "tables = build()\n"
        "one_step(tables), one_step(tables)\n"
    )
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": "",
        "RANK": "0",
        "FUSED_SLOTS_METRICS": "1000",
        "FUSED_SLOTS_METRICS_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)
    (path,) = tmp_path.iterdir()
    assert 'fused_slots_steps_total{rank="0",manager="0"} 2' in path.read_text().splitlines()


def test_records_go_through_anothers_handlers_once() -> None:
    script = (
        "import logging\n"
        "from fused_slots import logs\n"
        "vllm = logging.getLogger('vllm')\n"
        "vllm.propagate = False\n"
        "vllm.setLevel(logging.INFO)\n"
        "vllm.addHandler(logging.StreamHandler(__import__('sys').stdout))\n"
        "logging.getLogger('fused_slots').info('too early')\n"
        "logs.follow('vllm.plugins.fused_slots'), logs.follow('vllm.plugins.fused_slots')\n"
        "logging.getLogger('fused_slots.backends.cuda').warning('one')\n"
        "logs.logger.info('two')\n"
        "logs.logger.debug('not this')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["one", "two"]
    assert not done.stderr


def test_the_rank_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, rank in (("7", 7), ("x", 0), ("", 0)):
        monkeypatch.setenv("RANK", text)
        assert process_rank() == rank
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert process_rank() == 5
    assert logs.logger.name == "fused_slots"
    assert logging.getLogger("fused_slots") is logs.logger
    assert say_at_exit
