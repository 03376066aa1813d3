"""bench/ascend_first_run, rehearsed on a fake NPU whose kernels Triton interprets.

Nothing of it was run on hardware; what is tested is that a run goes on, whatever a part does, and
that a device which is wrong is noticed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.ascend_first_run.__main__ import LIMITS
from bench.ascend_first_run.parts import PARTS
from bench.ascend_first_run.report import ASSUMPTIONS
from tests.backends.first_run_fake import CORES

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
FAKE = ("--quick", "--rehearse", "tests.backends.first_run_fake")


def command(folder: Path, *arguments: str) -> list[str]:
    result = str(folder / "result.json")
    return [sys.executable, "-m", "bench.ascend_first_run", *arguments, "--json", result]


def environment(rehearsal: str = "", **variables: str) -> dict[str, str]:
    of_fake = {"TRITON_INTERPRET": "1", "REHEARSAL": rehearsal} if rehearsal else {}
    return os.environ | of_fake | variables


def rehearse(
    folder: Path, rehearsal: str, *arguments: str, parts: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    """Exit status, and each part's entry."""
    only = [word for part in parts for word in ("--only", part)]
    done = subprocess.run(
        command(folder, *FAKE, *only, *arguments),
        env=environment(rehearsal), cwd=ROOT, check=False, timeout=500,
    )  # fmt: skip
    return done.returncode, json.loads((folder / "result.json").read_text())["parts"]


def test_limits_are_of_all_parts_and_an_hour_in_all() -> None:
    assert set(LIMITS) == set(PARTS)
    assert sum(LIMITS.values()) <= 3600
    assert set(ASSUMPTIONS) <= set(LIMITS)
    names = list(LIMITS)
    assert names.index("lives") < names.index("latencies"), "correctness comes first"


def test_an_a3_is_gone_through_and_its_result_becomes_tables_and_an_archive(
    tmp_path: Path,
) -> None:
    code, parts = rehearse(tmp_path, "Ascend910_9391")
    assert code == 0
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(LIMITS, "ok")
    assert parts["machine"]["result"]["cores"] == 48
    assert parts["graphs"]["result"]["wrong_replays"] == 0
    assert parts["profiler"]["result"]["twelve groups, 4 decodes"]["slots_on_ascend"] == 4.0
    printed = subprocess.check_output(command(tmp_path, "tables"), cwd=ROOT, text=True)
    assert "Ascend910_9391, 48 vector cores" in printed
    for name in ASSUMPTIONS:
        assert f"| {name} | ok |" in printed
    assert "| twelve groups, 4 decodes |" in printed
    said = subprocess.check_output(command(tmp_path, "send"), cwd=ROOT, text=True)
    assert "issue tracker" in said
    [archive] = tmp_path.glob("*.zip")
    assert "Ascend910_9391" in archive.name
    with zipfile.ZipFile(archive) as file:
        assert json.loads(file.read("result.json"))["parts"] == parts
        assert file.read("tables.md").decode() + "\n" == printed


def test_a_950_has_other_cores(tmp_path: Path) -> None:
    _, parts = rehearse(tmp_path, "Ascend950PR_9589", parts=("machine",))
    assert parts["machine"]["result"]["cores"] == CORES["Ascend950PR_9589"] == 64


@pytest.mark.parametrize("what", ["hang", "crash", "oh no"])
def test_a_part_that_goes_wrong_does_not_take_the_next_with_it(tmp_path: Path, what: str) -> None:
    scale = ("--scale", "0.1") if what == "hang" else ()
    parts = ("cache", "lives")
    code, found = rehearse(tmp_path, f"Ascend910B3:cache={what}", *scale, parts=parts)
    ends = {"hang": "timed out", "crash": "crashed", "oh no": "failed"}
    assert [found[part]["status"] for part in parts] == [ends[what], "ok"]
    assert code == 1
    if what == "oh no":
        assert found["cache"]["error"] == "RuntimeError: oh no"
        assert "Traceback" in found["cache"]["log"]


@pytest.mark.parametrize("part", ["words", "lines", "cache", "events", "modes"])
def test_a_device_that_is_otherwise_than_assumed_is_noticed(tmp_path: Path, part: str) -> None:
    code, found = rehearse(tmp_path, f"Ascend910B3:{part}=wrong", parts=(part,))
    assert (code, found[part]["status"]) == (1, "wrong")
    assert found[part]["result"]


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(tmp_path: Path) -> None:
    only = ("--only", "lives", "--only", "cache")
    running = subprocess.Popen(
        command(tmp_path, *FAKE, *only), cwd=ROOT, env=environment("Ascend910B3:cache=hang"),
        stdout=subprocess.PIPE, text=True,
        # A shell ignores the signal for what it starts in the background; children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    begin = time.monotonic()
    while not (tmp_path / "result.json").exists():  # which is there once the first part is done
        assert time.monotonic() < begin + 200
        time.sleep(0.2)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "--continue" in rest
    parts = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "lives": "ok", "cache": "interrupted",
    }  # fmt: skip
    code, after = rehearse(tmp_path, "Ascend910B3", "--continue", parts=("lives", "cache"))
    assert (code, after["cache"]["status"]) == (0, "ok")
    assert after["lives"] == parts["lives"], "it was not run again"


TEACHES = """
import types
import torch
torch.utils.rename_privateuse1_backend("npu")
torch.npu = types.SimpleNamespace(is_available=lambda: False, get_device_name=str)
"""
FAILS = "raise ImportError('libhccl.so: cannot open shared object file')"


@pytest.mark.parametrize(
    ("installed", "said", "unsaid"),
    [
        (FAILS, "set_env.sh", "pip install"),
        (TEACHES, "without triton-ascend", "pip install"),
        ("", "pip install torch-npu", "set_env.sh"),
    ],
    ids=["no CANN", "autoload off", "nothing"],
)
def test_what_is_missing_is_in_the_result(
    tmp_path: Path, installed: str, said: str, unsaid: str
) -> None:
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if installed:
        (tmp_path / "torch_npu.py").write_text(installed)
        variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(command(tmp_path, "--only", "machine"), env=environment(**variables),
                          cwd=ROOT, check=False)  # fmt: skip
    entry = json.loads((tmp_path / "result.json").read_text())["parts"]["machine"]
    assert (done.returncode, entry["status"]) == (1, "failed")
    assert said in entry["error"]
    assert unsaid not in entry["error"]


def test_a_dry_run_does_what_a_cpu_can(tmp_path: Path) -> None:
    subprocess.run(
        command(tmp_path, "--dry-run", "--only", "words", "--only", "kernels"), cwd=ROOT, check=True
    )
    parts = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert parts["words"]["status"] == "needs an NPU"
    assert parts["kernels"]["result"]
