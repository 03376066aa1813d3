"""The plugin through vLLM's own loader: entry point, filter, spawned worker, unknown version."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
import vllm.plugins
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.v1.worker import gpu_input_batch

from fused_slots.vllm import plugin
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedBlockTables
from tests.vllm.loaded_worker import init_worker


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's loader as in a fresh process, without a filter."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.delenv("VLLM_PLUGINS")
    yield
    plugin.unregister()


def test_the_entry_point_is_installed() -> None:
    found = {e.name: e.value for e in entry_points(group=vllm.plugins.DEFAULT_PLUGINS_GROUP)}
    assert found["fused_slots"] == "fused_slots.vllm.plugin:register"


@pytest.mark.usefixtures("loader")
def test_vllms_loader_plugs_it_in() -> None:
    stock = model_runner.BlockTables
    vllm.plugins.load_general_plugins()
    assert model_runner.BlockTables is FusedBlockTables
    assert gpu_input_batch.MultiGroupBlockTable is MultiGroupBlockTable
    assert FusedBlockTables.stock is stock
    plugin.unregister()
    assert model_runner.BlockTables is stock


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(("filtered", "active"), [("something_else", False), ("fused_slots", True)])
def test_vllm_plugins_filters_it(
    filtered: str, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", filtered)
    vllm.plugins.load_general_plugins()
    assert (model_runner.BlockTables is FusedBlockTables) is active


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize("where", ["module", "distribution"])
def test_an_unknown_version_starts_with_its_own_tables(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "module":
        monkeypatch.setattr(vllm, "__version__", "0.34.0")
    else:
        monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.34.0"})
    stock = model_runner.BlockTables
    vllm.plugins.load_general_plugins()
    assert model_runner.BlockTables is stock
    assert re.search(r"expected .*0\.33\.0.*; got (vllm )?0\.34\.0", plugin.status().reason)


def test_a_spawned_worker_of_vllm_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.delenv("VLLM_PLUGINS")
    process = multiprocessing.get_context("spawn").Process(target=init_worker)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert json.loads((tmp_path / "notes").read_text()) == {
        "active": True,
        "v2": "fused_slots.vllm.v2",
        "v1": "fused_slots.vllm.v1",
    }
