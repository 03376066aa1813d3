"""Kernel entries as they declare themselves, and the numbers that kernels share with the host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import triton

import fused_slots
from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends.entries import Argument, arguments_of
from fused_slots.faults import ConfigurationError, FaultCode
from fused_slots.groups import GroupKind
from fused_slots.kernels import layout
from fused_slots.kernels.gpu.slots import slots_kernel
from fused_slots.kernels.gpu.step import step_kernel
from tests.kernels.offline import make_offline
from tests.kernels.test_compile import RecordingLauncher

ENTRIES = {kernel.fn.__name__: kernel for kernel in (slots_kernel, step_kernel)}
KERNELS = Path(fused_slots.__file__).parent / "kernels"


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_takes_what_changes_then_what_stays_then_constants(name: str) -> None:
    """The order in which launchers pass arguments, each kind with its pointers first."""
    fixed = set(make_offline(RecordingLauncher, [KVCacheGroup(16, 4)])._backend._fixed)

    def place(argument: Argument) -> int:
        if argument.word == "constant":
            return 4
        return 2 * (argument.name in fixed) + (not argument.is_pointer)

    places = [place(argument) for argument in arguments_of(ENTRIES[name])]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2, 3, 4}


@triton.jit
def undeclared(x_ptr, size):
    """Nothing.

    Args:
        x_ptr: int32 [size], what is read.
    """


def test_an_argument_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"declares \['x_ptr'\], and takes \['x_ptr', 'size'\]"):
        arguments_of(undeclared)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("gpu/*.py")), ids=lambda path: path.name)
def test_device_functions_take_few_arguments(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name not in ENTRIES:
            assert len(function.args.args) <= 20, function.name


def test_kernels_and_host_agree_on_codes_and_kinds() -> None:
    names = vars(layout)
    codes = {code.name: code.value for code in FaultCode if code.name in names}
    assert len(codes) >= 4
    assert codes == {name: names[name].value for name in codes}
    assert {kind: names[f"KIND_{kind.name}"].value for kind in GroupKind} == {
        kind: int(kind) for kind in GroupKind
    }


def test_a_plan_says_what_the_longest_query_means_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(plan: str, max_query_len: int | None) -> str:
        monkeypatch.setenv("FUSED_SLOTS_PLAN", plan)
        sizes = {"max_num_reqs": 8, "max_num_batched_tokens": 4096}
        tables = make_offline(RecordingLauncher, [KVCacheGroup(16, 4)], **sizes)
        return tables.launch_plan(4, 1200, max_query_len).describe()

    assert "computed" in describe("auto", 300)
    assert "searched" in describe("auto", 301)
    assert "request is" not in describe("auto", None)
    assert "the longest query takes 2 tiles" in describe("by_request", 900)
    assert "the longest query takes 1 tiles" in describe("by_request", 300)


def test_a_plan_that_a_backend_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_PLAN", "by_request")
    with pytest.raises(ConfigurationError, match="FUSED_SLOTS_PLAN: expected auto with the cpu"):
        AscendBlockTables.from_groups(
            [KVCacheGroup(16, 4)], max_num_reqs=2, max_num_batched_tokens=8, device="cpu"
        )
