"""The plugin against a small package that poses as vllm: what it replaces, and when it stays off.

tests/vllm and tests/releases run it against the engines themselves.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_slots import BlockTableError
from fused_slots.cli.diagnosis import plugin_state
from fused_slots.vllm import ascend_v1, plugin, releases, report
from fused_slots.vllm.ascend_v1 import FusedAscendMultiGroupBlockTable
from fused_slots.vllm.plugin import find_obstacle, register, status, unregister
from fused_slots.vllm.releases import CONTRACTS, Contract, UnsupportedVllmError, find_contract
from fused_slots.vllm.releases.vllm import CONTRACTS as VLLM_CONTRACTS
from fused_slots.vllm.releases.vllm import VLLM_0_30
from fused_slots.vllm.releases.vllm_ascend import CONTRACTS as ASCEND_CONTRACTS
from fused_slots.vllm.report import EngineReport, engine_report
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedAscendBlockTables, FusedBlockTables
from tests.fake_vllm import (
    ASCEND,
    ASCEND_PATCH,
    ASCEND_V1,
    ASCEND_V1_READER,
    FILES,
    V1,
    V1_READER,
    V1_RUNNER,
    V2,
    V2_READER,
    ascend_files,
    package_files,
    write_package,
)

SIZES = {
    "block_sizes": [4],
    "max_num_reqs": 2,
    "max_num_batched_tokens": 8,
    "max_num_blocks_per_group": [4],
    "device": torch.device("cpu"),
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the package that poses as vllm; nothing of it is loaded yet."""
    write_package(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.33.0"})
    monkeypatch.setattr(plugin, "_status", plugin._status)
    forget()
    yield tmp_path
    unregister()
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "vllm_ascend")]:
        del sys.modules[name]


ASCEND_FILES = ascend_files(ASCEND_CONTRACTS[0])


@pytest.fixture
def ascend(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_package(vllm, package_files(VLLM_0_30) | ASCEND_FILES)
    versions = {"vllm": "0.30.0", "vllm-ascend": "0.30.0rc2"}
    monkeypatch.setattr(plugin, "installed_versions", lambda: versions)
    return vllm


def test_both_runners_get_our_classes(vllm: Path) -> None:
    register()
    assert import_module(V2).BlockTables is FusedBlockTables
    assert import_module(V2_READER).BlockTables is FusedBlockTables
    assert import_module(V1).MultiGroupBlockTable is MultiGroupBlockTable
    assert import_module(V1_READER).MultiGroupBlockTable is MultiGroupBlockTable
    assert status().active
    assert f"{V2}.BlockTables" in status().replaced
    assert status().vllm_version == "0.33.0"


def test_modules_that_were_imported_before_are_bound_again(vllm: Path) -> None:
    runner, batch = import_module(V2_READER), import_module(V1_READER)
    stock = runner.BlockTables, batch.MultiGroupBlockTable
    register()
    register()
    assert runner.BlockTables is FusedBlockTables
    assert batch.MultiGroupBlockTable is MultiGroupBlockTable
    assert FusedBlockTables.stock is stock[0]
    unregister()
    assert (runner.BlockTables, batch.MultiGroupBlockTable) == stock
    assert import_module(V2).BlockTables is stock[0]
    assert FusedBlockTables.stock is None
    assert not status().active


def test_unregister_gives_back_the_runners_methods(vllm: Path) -> None:
    runner = import_module(V2_READER).GPUModelRunner
    originals = runner.execute_model, runner.prepare_attn
    register()
    assert (runner.execute_model, runner.prepare_attn) != originals
    unregister()
    assert (runner.execute_model, runner.prepare_attn) == originals


def test_a_name_that_somebody_replaced_after_us_is_left_to_them(vllm: Path) -> None:
    register()
    module = import_module(V2)
    theirs = type("Theirs", (), {})
    module.BlockTables = theirs
    unregister()
    assert module.BlockTables is theirs


@pytest.fixture
def reported(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], EngineReport]:
    monkeypatch.setattr(report, "installed_versions", lambda: plugin.installed_versions())
    return engine_report


def test_the_doctor_says_what_the_plugin_does(
    reported: Callable[[], EngineReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugin_state(reported()) == "becomes active when vLLM starts"
    register()
    assert plugin_state(reported()) == f"active: {status().reason}"
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "off")
    register()
    assert reported().off
    assert plugin_state(reported()) == "stays off: FUSED_SLOTS_VLLM=off"
    monkeypatch.setattr(plugin, "installed_versions", dict)
    assert plugin_state(reported()) == "vllm is not installed"


def test_the_report_names_release_contract_runner_and_what_is_replaced(
    reported: Callable[[], EngineReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert reported() == EngineReport(
        {"vllm": "0.33.0"},
        "vllm 0.33",
        "v1 runner (VLLM_USE_V2_MODEL_RUNNER=0)",
        (f"{V2}.BlockTables", f"{V1}.MultiGroupBlockTable"),
    )
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.34.0"})
    assert "got vllm 0.34.0" in reported().obstacle
    assert (reported().contract, reported().off) == ("", False)


def run_step(runner_class: Any) -> tuple[int, Any]:
    """A step of a runner whose tables have a write staged; launches and its result."""
    runner = runner_class()
    runner.block_tables = import_module(V2_READER).BlockTables(**SIZES)
    runner.block_tables.append_block_ids(1, [[3]], overwrite=True)
    before = runner.block_tables.launches
    batch = SimpleNamespace(
        idx_mapping=torch.tensor([1]),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        positions=torch.tensor([2]),
    )
    result = runner.execute_model(batch)
    return runner.block_tables.launches - before, result


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_step_of_the_runner_is_one_launch(vllm: Path, imported: str) -> None:
    if imported == "before":
        import_module(V2_READER)
    register()
    launches, (tables, slots) = run_step(import_module(V2_READER).GPUModelRunner)
    assert launches == 1
    assert tables[0].tolist() == [[3, 0, 0, 0]]
    assert slots.tolist() == [[14]]


def test_a_runner_under_prefill_context_parallelism_takes_two_launches(vllm: Path) -> None:
    register()
    runner = import_module(V2_READER).GPUModelRunner
    runner.pcp_manager = object()
    launches, (_, slots) = run_step(runner)
    assert launches == 2
    assert slots.tolist() == [[14]]


def test_an_early_return_of_the_runner_applies_the_writes(vllm: Path) -> None:
    register()
    runner = import_module(V2_READER).GPUModelRunner()
    runner.block_tables = import_module(V2_READER).BlockTables(**SIZES)
    runner.block_tables.append_block_ids(1, [[3]], overwrite=True)
    assert runner.execute_model(None) is None
    assert runner.block_tables.block_tables[0].gpu[1, 0] == 3


def test_a_runner_with_vllms_own_tables_is_left_alone(vllm: Path) -> None:
    import_module(V2_READER)
    register()
    runner = import_module(V2_READER).GPUModelRunner()
    runner.block_tables = FusedBlockTables.stock()  # type: ignore[misc]
    assert runner.execute_model(None) is None
    runner.prepare_attn(SimpleNamespace(idx_mapping=0, query_start_loc=0, positions=0))
    assert runner.block_tables.called == "compute_slot_mappings"


def test_one_line_per_outcome(vllm: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(3):
            register()
    (record,) = caplog.records
    assert record.name == "fused_slots"
    assert record.levelname == "INFO"
    assert "active: vllm 0.33, v1 or v2 runner (by default v2 for" in record.message
    assert "in the place of vllm.v1.worker.gpu.block_table.BlockTables and " in record.message


WRONG = {
    "another version": {"vllm/__init__.py": '__version__ = "0.34.0"'},
    "an older constructor": {
        "vllm/v1/worker/gpu/block_table.py": FILES["vllm/v1/worker/gpu/block_table.py"].replace(
            "max_num_blocks_per_group", "max_model_len"
        )
    },
    "a method less": {
        "vllm/v1/worker/gpu/block_table.py": FILES["vllm/v1/worker/gpu/block_table.py"].replace(
            "get_dummy_slot_mappings", "dummy_slot_mappings"
        )
    },
    "an argument more": {
        "vllm/v1/worker/gpu/block_table.py": FILES["vllm/v1/worker/gpu/block_table.py"].replace(
            "out_ptrs=None", "out_ptrs=None, layout=None"
        )
    },
    "a v1 constructor with kernel_block_sizes": {
        "vllm/v1/worker/block_table.py": FILES["vllm/v1/worker/block_table.py"].replace(
            " block_sizes=None", " block_sizes=None, kernel_block_sizes=None"
        )
    },
    "a broken vllm": {"vllm/v1/worker/gpu/block_table.py": "import no_such_module"},
}
SAYS = {
    "another version": r"__version__: expected 0\.33\.0, .* got 0\.34\.0",
    "an older constructor": r"BlockTables.__init__: expected .*_per_group.* got .*max_model_len",
    "a method less": "get_dummy_slot_mappings: .* got no such method",
    "an argument more": "gather_block_tables: .* got .*layout",
    "a v1 constructor with kernel_block_sizes": "MultiGroupBlockTable.__init__.*kernel_block_size",
    "a broken vllm": "no_such_module",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_left_as_it_was_and_named(
    vllm: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_package(vllm, WRONG[what])
    with caplog.at_level(logging.INFO, "vllm"):
        register()
        register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "inactive" in record.message
    assert record.message.endswith(status().reason)
    assert re.search(SAYS[what], status().reason)
    assert find_obstacle() == status().reason
    assert (status().active, status().replaced) == (False, ())
    if what != "a broken vllm":
        assert import_module(V2).BlockTables.__module__ == V2
        assert import_module(V1).MultiGroupBlockTable.__module__ == V1


@pytest.mark.parametrize("what", [name for name in WRONG if name != "a broken vllm"])
def test_strict_insists(vllm: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(vllm, WRONG[what])
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "strict")
    with pytest.raises(UnsupportedVllmError, match=SAYS[what]):
        register()
    assert import_module(V2).BlockTables.__module__ == V2


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"vllm": "0.34.0"}, "vllm: expected one of the releases vllm 0.33.0; .*got vllm 0.34.0"),
        ({"vllm": "0.33.1"}, "got vllm 0.33.1. fused_slots replaces nothing in a release that"),
        ({"vllm": "0.20.2"}, "0.22.0, 0.22.1, 0.23.0, 0.24.0, 0.25.0, 0.25.1; got vllm 0.20.2"),
        ({"vllm": ""}, "got vllm of no version"),
        ({}, "got none installed"),
        ({"vllm": "0.33.0", "vllm-ascend": "0.30.0rc2"}, "ascend: .*got vllm 0.33.0 with vllm-a"),
        ({"vllm": "0.30.0", "vllm-ascend": "0.31.0"}, "0.30.0rc1, 0.30.0rc2.*ascend 0.31.0"),
    ],
)
def test_a_release_that_nobody_read_is_refused_by_name(
    versions: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_versions", lambda: versions)
    assert re.search(says, find_obstacle())
    register()
    assert (status().active, status().contract) == (False, "")


@pytest.mark.parametrize(
    ("contract", "version"), [(c, v) for c in VLLM_CONTRACTS for v in c.releases["vllm"]]
)
def test_each_release_that_was_read_gets_its_contract(
    vllm: Path, contract: Contract, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": version})
    write_package(vllm, package_files(contract))
    write_package(vllm, {"vllm/__init__.py": f"__version__ = {version!r}"})
    register()
    assert (status().active, status().contract) == (True, contract.name)
    assert run_step(import_module(V2_READER).GPUModelRunner)[0] == 1
    unregister()
    # The same version with another release's signatures, as a fork may have.
    forget()
    other = next(c for c in VLLM_CONTRACTS if c.tables[0].methods != contract.tables[0].methods)
    write_package(vllm, {k: v for k, v in package_files(other).items() if "block_table" in k})
    register()
    assert not status().active
    assert f"as in {contract.name}; got" in status().reason


def test_no_two_contracts_have_a_release_in_common() -> None:
    for contract in CONTRACTS:
        for version in contract.releases["vllm"]:
            rest = {name: versions[0] for name, versions in contract.releases.items()}
            assert find_contract(rest | {"vllm": version}) is contract


def test_a_local_build_of_the_release_fits(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(vllm, {"vllm/__init__.py": '__version__ = "0.33.0+cu129"'})
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.33.0+cpu"})
    assert find_obstacle() == ""
    register()
    assert status().active


def test_off_is_off_and_takes_back_what_was_on(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "off")
    with caplog.at_level(logging.INFO, "vllm"):
        register()
    assert import_module(V2).BlockTables.__module__ == V2
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert find_obstacle() == status().reason == "FUSED_SLOTS_VLLM=off"


def test_a_mode_that_is_none_is_named_and_off(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "yes")
    register()
    assert not status().active
    assert "auto or strict or off; got 'yes'" in status().reason


def test_mamba_groups_can_be_turned_to_none(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = import_module("vllm.v1.kv_cache_interface").MambaSpec
    register()
    assert spec().uses_slot_mapping
    monkeypatch.setenv("FUSED_SLOTS_VLLM_MAMBA", "none")
    register()
    register()
    assert not spec().uses_slot_mapping
    unregister()
    assert spec().uses_slot_mapping
    assert "uses_slot_mapping" not in vars(spec)


REFUSED = SIZES | {"cp_size": 2, "cp_interleave": 3}


def test_a_configuration_that_we_refuse_gets_vllms_own_tables(
    vllm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    tables = import_module(V2).BlockTables(**REFUSED)
    assert type(tables).__module__ == V2
    assert "stands back for BlockTables: context_parallel.interleave" in caplog.text


def test_a_kernel_that_does_not_compile_gets_vllms_own_tables(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warmup(self: object) -> None:
        raise RuntimeError("the compiler crashed")

    monkeypatch.setattr(FusedBlockTables, "warmup", warmup)
    register()
    assert type(import_module(V2).BlockTables(**SIZES)).__module__ == V2
    assert "stands back for BlockTables: the compiler crashed" in caplog.text
    assert "Traceback" in caplog.text
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "strict")
    with pytest.raises(RuntimeError, match="the compiler crashed"):
        import_module(V2).BlockTables(**SIZES)


def test_strict_refuses_such_a_configuration(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "strict")
    register()
    with pytest.raises(BlockTableError, match=r"context_parallel\.interleave"):
        import_module(V2).BlockTables(**REFUSED)
    unregister()
    with pytest.raises(BlockTableError, match=r"context_parallel\.interleave"):
        FusedBlockTables(**REFUSED)


def test_a_runner_whose_methods_changed_is_refused(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = import_module(V2_READER).GPUModelRunner
    monkeypatch.setattr(runner, "prepare_attn", lambda self, input_batch, layout: None)
    register()
    assert "prepare_attn: expected (input_batch)" in status().reason
    assert import_module(V2).BlockTables.__module__ == V2


def their_wrapper(original: Any) -> Any:
    """What a plug-in puts around a method without keeping its signature."""
    return lambda *args, **kwargs: original(*args, **kwargs)


def test_a_runner_wrapped_by_somebody_between_two_calls_gets_every_name_back(vllm: Path) -> None:
    register()
    runner = import_module(V2_READER)  # takes our class from the name of vLLM's
    runner.GPUModelRunner.execute_model = their_wrapper(runner.GPUModelRunner.execute_model)
    assert not status().active
    assert "execute_model: expected (scheduler_output" in status().reason
    register()
    assert not status().active
    for module, name in ((V2, "BlockTables"), (V1, "MultiGroupBlockTable")):
        assert getattr(import_module(module), name).__module__ == module
    assert runner.BlockTables.__module__ == V2
    assert run_stock(runner.GPUModelRunner) == "compute_slot_mappings"


def run_stock(runner_class: Any) -> str:
    """The last call that a step made of the tables that the runner builds."""
    runner = runner_class()
    runner.block_tables = import_module(V2_READER).BlockTables(**SIZES)
    assert not isinstance(runner.block_tables, FusedBlockTables)
    runner.execute_model(SimpleNamespace(idx_mapping=0, query_start_loc=0, positions=0))
    called: str = runner.block_tables.called
    return called


@pytest.mark.parametrize("how", ["unregister", "off"])
def test_names_imported_from_ours_are_given_back(
    vllm: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    runner, batch = import_module(V2_READER), import_module(V1_READER)
    if how == "off":
        monkeypatch.setenv("FUSED_SLOTS_VLLM", "off")
        register()
    else:
        unregister()
    assert runner.BlockTables.__module__ == V2
    assert batch.MultiGroupBlockTable.__module__ == V1
    assert run_stock(runner.GPUModelRunner) == "compute_slot_mappings"
    assert not status().active


@pytest.mark.parametrize("name", [V2, V2_READER])
def test_a_name_that_another_plug_in_has_replaced_is_theirs(vllm: Path, name: str) -> None:
    module = import_module(name)
    theirs = type("Theirs", (module.BlockTables,), {"__module__": "other.plug_in"})
    module.BlockTables = theirs
    register()
    assert f"{name}.BlockTables: expected the engine's own class; got other.plug_in.Theirs" in (
        status().reason
    )
    assert module.BlockTables is theirs
    assert import_module(V1).MultiGroupBlockTable.__module__ == V1


@pytest.mark.parametrize("name", [V2, V2_READER])
def test_the_status_is_what_vllm_would_build_now(vllm: Path, name: str) -> None:
    register()
    module, reader = import_module(name), import_module(V2_READER)
    assert status().active
    module.BlockTables = type("Theirs", (), {"__module__": "other.plug_in"})
    assert (status().active, status().contract) == (False, "vllm 0.33")
    assert "got other.plug_in.Theirs" in status().reason
    register()
    assert not status().active
    assert import_module(V1).MultiGroupBlockTable.__module__ == V1
    assert module.BlockTables.__module__ == "other.plug_in"
    assert reader.BlockTables is not FusedBlockTables


def test_a_class_derived_from_ours_counts_as_ours_and_keeps_its_errors(vllm: Path) -> None:
    register()
    runner = import_module(V2_READER)

    class Theirs(FusedBlockTables):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            raise RuntimeError("their own mistake")

    runner.BlockTables = Theirs
    register()
    assert status().active
    assert runner.BlockTables is Theirs
    with pytest.raises(RuntimeError, match="their own mistake"):
        runner.BlockTables(**SIZES)


def test_a_runner_wrapped_around_our_wrapper_is_not_wrapped_again(vllm: Path) -> None:
    runner = import_module(V2_READER).GPUModelRunner
    register()
    ours = runner.prepare_attn

    @wraps(ours)
    def theirs(self: Any, input_batch: Any) -> Any:
        return ours(self, input_batch)

    runner.prepare_attn = theirs
    register()
    assert status().active
    assert runner.prepare_attn is theirs
    assert run_step(runner)[0] == 1


def test_arguments_by_position_are_those_of_the_release(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.30.0"})
    write_package(vllm, package_files(VLLM_0_30))
    register()
    build = import_module(V2).BlockTables
    arguments = [4], 2, 8, [4], torch.device("cpu"), [2]
    assert build(*arguments).kernel_block_sizes == [2]
    assert build(*arguments).blocks_per_kv_block == [2]
    with pytest.raises(TypeError):  # vLLM's own class's
        build(*arguments, *range(9))
    assert "15 arguments, of which 10 have names" in caplog.text


def test_the_runners_pools_reach_the_tables(vllm: Path) -> None:
    """v2 and v1: at the first step, and when the config is another object after profiling."""
    register()
    v2, v1 = import_module(V2_READER), import_module(V1_RUNNER)
    runner = v2.GPUModelRunner()
    runner.block_tables = v2.BlockTables(**SIZES)
    batch = import_module(V1_READER).MultiGroupBlockTable(2, 8, False, "cpu", [4], [4])
    old = v1.GPUModelRunner()
    old.input_batch = SimpleNamespace(block_table=batch)
    group = SimpleNamespace(kv_cache_spec=None)
    for num_blocks in (3, 9):
        config = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])
        runner.kv_cache_config = old.kv_cache_config = config
        runner.execute_model(None)
        runner.block_tables.append_block_ids(0, [[num_blocks - 1]], overwrite=True)
        runner.block_tables.apply_staged_writes()
        with pytest.raises(BlockTableError, match=f"got {num_blocks}"):
            runner.block_tables.append_block_ids(0, [[num_blocks]], overwrite=True)
        old.execute_model([[num_blocks - 1]])
        with pytest.raises(BlockTableError, match=f"got {num_blocks}"):
            old.execute_model([[num_blocks]])
    old.input_batch.block_table = SimpleNamespace(append_row=lambda *_: "their own")
    assert old.execute_model([[4]]) == "their own"


def test_the_environment_says_which_runner_runs(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        register()
        says = f"v{int(value) + 1} runner (VLLM_USE_V2_MODEL_RUNNER={value})"
        assert f"vllm 0.33, {says}, in the place of" in status().reason


@pytest.mark.parametrize("first", ["fused_slots", "vllm_ascend", "vllm_ascend, runner unloaded"])
def test_vllm_ascends_runner_gets_ours_whoever_registers_first(ascend: Path, first: str) -> None:
    if first == "vllm_ascend":
        import_module(ASCEND_PATCH)
    elif first.startswith("vllm_ascend"):
        import_module(ASCEND)
    register()
    import_module(ASCEND_PATCH)
    runner = import_module(V2_READER)
    assert runner.BlockTables is FusedAscendBlockTables
    assert import_module(ASCEND).AscendBlockTables is FusedAscendBlockTables
    # Its own class derives from this one, and its v1 runner builds others than vLLM's.
    assert import_module(V2).BlockTables.__module__ == V2
    assert import_module(V1).MultiGroupBlockTable.__module__ == V1
    tables = runner.BlockTables(**SIZES)
    assert tables.slot_mappings.dtype == torch.int32
    assert run_step(runner.GPUModelRunner)[0] == 1


def test_a_vllm_ascend_with_another_constructor_is_left_alone(ascend: Path) -> None:
    name = "vllm_ascend/worker/v2/block_table.py"
    text = ASCEND_FILES[name].replace("kernel_block_sizes=None", "block_table_pad=None")
    write_package(ascend, {name: text})
    register()
    assert status().active
    import_module(ASCEND)
    assert not status().active
    assert "AscendBlockTables.__init__: expected" in status().reason
    assert "block_table_pad" in status().reason
    assert import_module(ASCEND).AscendBlockTables.__module__ == ASCEND
    assert import_module(V2).BlockTables.__module__ == V2


V1_SIZES: dict[str, Any] = {
    "max_num_reqs": 2,
    "max_model_len": 64,
    "max_num_batched_tokens": 8,
    "pin_memory": False,
    "device": torch.device("cpu"),
    "block_sizes": [16],
}


@pytest.mark.parametrize("first", ["fused_slots", "its tables", "its input batch", "both late"])
def test_vllm_ascends_input_batch_gets_ours_whoever_is_imported_first(
    ascend: Path, first: str
) -> None:
    if first == "its tables":
        import_module(ASCEND_V1)
    elif first == "its input batch":
        import_module(ASCEND_V1_READER)
    register()
    register()
    assert first == "its input batch" or ASCEND_V1_READER not in sys.modules
    assert status().active
    reader = import_module(ASCEND_V1_READER)
    assert type(reader.build(**V1_SIZES)) is FusedAscendMultiGroupBlockTable
    assert f"{ASCEND_V1_READER}.MultiGroupBlockTable" in status().replaced
    unregister()
    assert type(reader.build(**V1_SIZES)).__module__ == ASCEND_V1
    assert import_module(ASCEND_V1).MultiGroupBlockTable is reader.MultiGroupBlockTable


def test_after_unregister_a_late_import_replaces_nothing(ascend: Path) -> None:
    register()
    unregister()
    assert import_module(ASCEND_V1_READER).MultiGroupBlockTable.__module__ == ASCEND_V1
    assert not status().active


def test_strict_lets_a_late_import_fail_where_the_class_is_another(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ASCEND_V1.replace(".", "/") + ".py"
    write_package(ascend, {name: ASCEND_FILES[name].replace("kernel_sizes", "kernel_block_sizes")})
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "strict")
    register()
    with pytest.raises(releases.UnsupportedVllmError, match=r"kernel_sizes.*kernel_block"):
        import_module(ASCEND_V1_READER)


def test_on_a_310p_nothing_is_replaced(ascend: Path) -> None:
    write_package(ascend, {"vllm_ascend/_build_info.py": "__device_type__ = '_310P'"})
    register()
    reader = import_module(ASCEND_V1_READER)
    assert reader.MultiGroupBlockTable.__module__ == ASCEND_V1
    assert "other than the 310P; got 310P" in status().reason


REFUSED_V1 = {
    "prefill": ("prefill_context_parallel_size: expected 1", {"pcp": (2, 0)}),
    "drafts under decode context parallelism": ("num_speculative_tokens under", {"dcp": (2, 1)}),
}


@pytest.mark.parametrize("name", REFUSED_V1)
def test_vllm_ascends_own_tables_are_built_where_ours_cannot_be_right(
    ascend: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    message, groups = REFUSED_V1[name]
    monkeypatch.setattr(ascend_v1, "parallel_group", lambda name: groups.get(name, (1, 0)))
    register()
    reader = import_module(ASCEND_V1_READER)
    built = reader.build(**V1_SIZES, num_speculative_tokens=2)
    assert type(built).__module__ == ASCEND_V1
    assert message in caplog.text


def test_unregister_gives_vllm_ascend_its_runner_back(ascend: Path) -> None:
    import_module(ASCEND_PATCH)
    theirs = import_module(ASCEND).AscendBlockTables
    register()
    unregister()
    assert import_module(V2_READER).BlockTables is theirs
    assert import_module(ASCEND).AscendBlockTables is theirs


def test_a_configuration_that_we_refuse_gets_vllm_ascends_own_tables(ascend: Path) -> None:
    register()
    assert type(import_module(ASCEND).AscendBlockTables(**REFUSED)).__module__ == ASCEND


NO_VLLM = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
sys.modules["vllm"] = None
from fused_slots.vllm import plugin
plugin.register()
print(plugin.status().active)
os.environ["FUSED_SLOTS_VLLM"] = "strict"
try:
    plugin.register()
except Exception as error:
    print(type(error).__name__)
"""


def test_without_vllm_it_says_so_and_raises_only_when_strict() -> None:
    output = subprocess.run(
        [sys.executable, "-c", NO_VLLM], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert output[0].startswith("WARNING:fused_slots:")
    assert output[1] == "False"
    assert output[-1] in ("ModuleNotFoundError", "ImportError", "UnsupportedVllmError")


def test_versions_are_read_from_the_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases.metadata, "version", lambda name: f"{name} 1.2.3")
    assert releases.installed_versions() == {
        "vllm": "vllm 1.2.3",
        "vllm-ascend": "vllm-ascend 1.2.3",
    }

    def missing(name: str) -> str:
        raise releases.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(releases.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    assert releases.installed_versions() == {"vllm-ascend": ""}
