"""The doctor finds what is wrong here, and combinations of packages that are known not to work."""

from __future__ import annotations

import argparse

import pytest

from fused_slots import env
from fused_slots.backends.cpu import CpuBackend
from fused_slots.cli import diagnosis as doctor
from fused_slots.cli.diagnosis import MISSING, diagnose, installed_version, package_problems
from fused_slots.cli.doctor import run_doctor
from fused_slots.host import rows
from fused_slots.vllm.report import EngineReport
from tests.host_halves import HALVES

HEALTHY = {
    **dict.fromkeys(doctor.PACKAGES, MISSING),
    "torch": "2.13.0+cpu",
    "numpy": "2.3.5",
    "triton": "3.6.0",
}


def test_this_machine_works_on_the_cpu() -> None:
    diagnosis = diagnose()
    assert diagnosis.backends["cpu"] == "works"
    assert diagnosis.versions["torch"] == installed_version("torch")
    assert set(diagnosis.environment) == {variable.name for variable in env.VARIABLES}


def test_the_half_that_stages_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for half in HALVES:
        monkeypatch.setenv("FUSED_SLOTS_HOST", half)
        assert diagnose().staging.split()[0] == half
    monkeypatch.setattr(rows, "NATIVE", False)
    monkeypatch.setattr(doctor, "NATIVE", False)
    monkeypatch.setenv("FUSED_SLOTS_HOST", "auto")
    assert diagnose().staging == "python (the native half was not compiled)"
    monkeypatch.setenv("FUSED_SLOTS_HOST", "native")
    diagnosis = diagnose()
    assert diagnosis.staging.startswith("not usable: FUSED_SLOTS_HOST=native: expected")
    assert any("FUSED_SLOTS_HOST=native" in problem for problem in diagnosis.problems)


def test_bad_setting_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "perhaps")
    diagnosis = diagnose()
    assert diagnosis.environment["FUSED_SLOTS_VLLM"] == "(bad value)"
    assert any("expected auto or strict or off; got 'perhaps'" in p for p in diagnosis.problems)


def test_a_misspelt_variable_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_" + "BAKEND", "cpu")
    monkeypatch.setenv("FUSED_SLOTS_" + "42", "1")
    unknown, misspelt = diagnose().problems[:2]
    assert misspelt == (
        f"FUSED_SLOTS_{'BAKEND'} is set, but no variable of that name is read; did you mean "
        f"{env.BACKEND.name}?"
    )
    assert unknown.endswith("_42 is set, but no variable of that name is read")


class _WrongSlot(CpuBackend):
    def step(self, *args: object) -> None:
        super().step(*args)  # type: ignore[arg-type]
        self.slot_mappings[0, 0] += 1


def test_backend_that_maps_wrongly_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_slots.block_tables.backend_class", lambda _: _WrongSlot)
    diagnosis = diagnose()
    assert diagnosis.backends["cpu"] == "WRONG: slot 82, expected 81"
    assert any(p.startswith("The CPU backend does not work: WRONG") for p in diagnosis.problems)


@pytest.mark.parametrize(
    ("installed", "cuda", "problem"),
    [
        ({"triton-ascend": "3.2.0"}, False, "both own the module `triton`"),
        ({"triton": MISSING}, True, "CUDA device but no triton"),
        ({"torch-npu": "2.9.0"}, False, "torch-npu but no triton-ascend"),
        ({"numpy": "2.4.1"}, False, "numpy 2.4.1 breaks the interpreter"),
        ({"numpy": "3.0rc1"}, False, "numpy 3.0rc1 breaks the interpreter"),
    ],
)
def test_known_bad_combination_is_a_problem(
    installed: dict[str, str], cuda: bool, problem: str
) -> None:
    (found,) = package_problems({**HEALTHY, **installed}, cuda)
    assert problem in found


@pytest.mark.parametrize(
    ("engine", "is_problem", "line"),
    [
        (EngineReport({}, obstacle="vllm is not installed"), False, ""),
        (EngineReport({"vllm": "0.34.0"}, obstacle="use 0.33.0"), True, "use 0.33.0"),
        (EngineReport({"vllm": "0.33.0"}, "vllm 0.33", off=True, obstacle="off"), False, "off"),
        (EngineReport({"vllm": "0.33.0"}, "vllm 0.33", "v2 runner", ("A", "B")), False, "nothing"),
    ],
)
def test_what_is_in_the_way_of_the_plugin_is_a_problem_unless_it_was_asked_for(
    engine: EngineReport, is_problem: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "engine_report", lambda: engine)
    result = run_doctor(argparse.Namespace(quiet=True, json=True))
    problem = f"The vLLM plugin stays off. {engine.obstacle}"
    assert (problem in diagnose().problems) is is_problem
    text = result.text
    assert (f"  {'in the way':<27}{line}" in text) is bool(line)
    assert (f"  {'replaces':<27}A, B" in text) is bool(engine.replaces)


@pytest.mark.parametrize(
    "installed",
    [{}, {"triton": MISSING}, {"vllm": "0.33.0+cpu"}, {"triton": "3.7.0", "numpy": "2.4.0"}],
)
def test_good_combination_is_no_problem(installed: dict[str, str]) -> None:
    assert package_problems({**HEALTHY, **installed}, False) == []


def test_absent_package_has_no_version() -> None:
    assert installed_version("no-package-of-this-name") == MISSING
