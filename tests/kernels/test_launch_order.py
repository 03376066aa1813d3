"""What reaches the driver is what was asked for, through the launcher of the Triton installed.

Triton's launcher is compiled for real and its driver library is a stub (stub_cuda.c), so that the
order of arguments of each release is observed without a GPU. `make test-triton` runs this with
other releases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.stub_launches import STREAM

pytest.importorskip("triton.backends.nvidia")

KERNELS = {"step_kernel", "slots_kernel"}


@pytest.fixture(scope="module", params=["prepared", "own call"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Launches through the way that fits the release, and through the launcher object's own."""
    own_call = request.param == "own call"
    folder = tmp_path_factory.mktemp("stub")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.stub_launches", str(folder), str(int(own_call))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found["asked_own_call"] = own_call
    return found


def test_the_launcher_is_known_and_the_way_asked_for_is_taken(report: Any) -> None:
    assert all(report["known"])
    assert set(report["own_call"]) == {report["asked_own_call"]}


def test_every_kernel_is_launched_on_nothing_first_and_then_for_the_call(report: Any) -> None:
    launches = report["launches"]
    variants = [launch["kernel"] for launch in launches]
    assert {variant.split("-")[0] for variant in variants} == KERNELS
    for variant in set(variants):
        first, *others = (launch for launch in launches if launch["kernel"] == variant)
        assert (first["asked_grid"], first["asked"]["capacity"]) == ([3, 1, 1], 0)
        assert others, "the call itself"
        assert all(launch["asked"]["capacity"] > 0 for launch in others)


def test_what_arrives_is_what_was_asked_for(report: Any) -> None:
    for launch in report["launches"]:
        assert launch["count"] == 1
        assert launch["grid"] == launch["asked_grid"]
        assert launch["block"] == [launch["asked_threads"], 1, 1]
        assert launch["stream"] == STREAM
        assert launch["function"] == launch["asked_function"]
        *arguments, scratch, profile_scratch = launch["arrived"]
        named = dict(zip(launch["asked"], arguments, strict=True))
        assert named == launch["asked"], launch["kernel"]
        assert (scratch, profile_scratch) == (0, 0)


def test_kernels_stay_loaded_while_they_can_be_launched(report: Any) -> None:
    assert report["unloads"] == 0
