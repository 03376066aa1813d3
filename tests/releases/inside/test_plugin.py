"""The plugin through the release's own loader: what it takes, and when it stays off."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import vllm.plugins
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.worker import gpu_input_batch
from vllm.v1.worker.gpu import model_runner

from fused_slots.vllm import plugin
from fused_slots.vllm.plugin import status
from fused_slots.vllm.releases import UnsupportedVllmError, find_contract, installed_versions
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedBlockTables

STOCK = model_runner.BlockTables, gpu_input_batch.MultiGroupBlockTable
ABSTRACT = {"KVCacheSpec", "AttentionSpec"}


@pytest.fixture(autouse=True)
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loader as in a fresh process, and afterwards every name as it was."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    yield
    monkeypatch.undo()
    if model_runner.BlockTables.__name__ == "Theirs":
        model_runner.BlockTables = STOCK[0]
    plugin.unregister()
    assert names() == STOCK


def names() -> tuple[type, type]:
    return model_runner.BlockTables, gpu_input_batch.MultiGroupBlockTable


def load() -> None:
    vllm.plugins.load_general_plugins()


def test_every_spec_class_of_the_release_is_named() -> None:
    found = {
        name
        for name, value in vars(interface).items()
        if isinstance(value, type) and issubclass(value, interface.KVCacheSpec)
    }
    assert found - ABSTRACT <= set(find_contract(installed_versions()).spec_kinds)


def test_its_loader_plugs_it_in(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.plugins.fused_slots"):
        load()
    assert names() == (FusedBlockTables, MultiGroupBlockTable)
    assert (FusedBlockTables.stock, MultiGroupBlockTable.stock) == STOCK
    contract = find_contract({"vllm": metadata.version("vllm")})
    assert (status().active, status().contract) == (True, contract.name)
    assert f"active: {contract.name}, v2 runner (VLLM_USE_V2_MODEL_RUNNER=1)" in caplog.text


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "off")
    load()
    assert names() == STOCK


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_release_that_nobody_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_VLLM", mode)
    monkeypatch.setattr(plugin, "installed_versions", lambda: {"vllm": "0.34.0"})
    if mode == "strict":
        with pytest.raises(UnsupportedVllmError, match=r"got vllm 0\.34\.0"):
            load()
    else:
        load()
    assert names() == STOCK
    assert "got vllm 0.34.0" in status().reason


OTHER = """
from vllm.v1.worker.gpu import model_runner
def register():
    class Theirs(model_runner.BlockTables): pass
    model_runner.BlockTables = Theirs
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_plug_in_that_takes_the_same_name(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First there, the name is theirs; after us, their class derives from ours."""
    (tmp_path / f"other_plug_in_{order}.py").write_text(OTHER)
    info = tmp_path / f"other_{order}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other-{order}\nVersion: 1.0\n")
    # Newer loaders go by the names of the entry points, older ones by the path.
    at, name = (0, "a_name") if order == "before" else (len(sys.path), "z_name")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{name} = other_plug_in_{order}:register\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path[:at], str(tmp_path), *sys.path[at:]])
    monkeypatch.setenv("FUSED_SLOTS_VLLM", "auto")
    load()
    theirs = model_runner.BlockTables
    assert theirs.__name__ == "Theirs"
    assert status().active is (order == "after")
    assert issubclass(theirs, FusedBlockTables) is (order == "after")
    if order == "before":
        assert f"got other_plug_in_{order}." in status().reason
        assert gpu_input_batch.MultiGroupBlockTable is STOCK[1]
