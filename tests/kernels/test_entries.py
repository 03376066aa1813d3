"""Kernel entries as they declare themselves, and the numbers that kernels share with the host."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import fused_slots
from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends.entries import runtime_types
from fused_slots.faults import ConfigurationError, FaultCode
from fused_slots.groups import GroupKind
from fused_slots.kernels import layout
from fused_slots.kernels.gpu.slots import slots_kernel
from fused_slots.kernels.gpu.step import step_kernel
from tests.kernels.offline import make_offline
from tests.kernels.test_compile import RecordingLauncher

ENTRIES = {kernel.fn.__name__: kernel for kernel in (slots_kernel, step_kernel)}
KERNELS = Path(fused_slots.__file__).parent / "kernels"


IN_WORDS = {"i32": "int32", "i64": "int64", "index": "int32 or int64", "slot": "int32 or int64"}
IN_WORDS["table"] = "int32"  # where it is not WHOLE


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_takes_what_changes_then_what_stays_then_constants(name: str) -> None:
    """The order in which launchers pass arguments, each kind with its pointers first."""
    fixed = set(make_offline(RecordingLauncher, [KVCacheGroup(16, 4)])._backend._fixed)
    types = runtime_types(ENTRIES[name])
    places = [2 * (argument in fixed) + (types[argument][0] != "*") for argument in types]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2, 3}
    assert list(types) == ENTRIES[name].arg_names[: len(types)]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_docstring_says_of_each_argument_what_its_annotation_does(name: str) -> None:
    section = str(inspect.getdoc(ENTRIES[name].fn)).partition("Args:\n")[2]
    said = dict(re.findall(r"^ {4}(\w+): (.*)", section, re.MULTILINE))
    assert list(said) == ENTRIES[name].arg_names
    for argument, type_ in runtime_types(ENTRIES[name]).items():
        words = IN_WORDS[type_.removeprefix("*")]
        assert said[argument].startswith(words + (" [" if type_[0] == "*" else ",")), argument


def test_a_variant_decides_how_wide_its_arguments_are() -> None:
    widths = {"index": torch.int64, "slot": torch.int32, "table": torch.int64}
    types = runtime_types(step_kernel, **widths)
    assert (types["idx_mapping_ptr"], types["slots_ptr"]) == ("*i64", "*i32")
    assert (types["gathered_ptr"], types["capacity"]) == ("*i64", "i32")


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
