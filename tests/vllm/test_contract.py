"""What vLLM 0.33.0's own sources do with the tables: nobody reads a name that we lack."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker import block_table as v1_module
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.pcp_manager import PCPManager

import fused_slots
from fused_slots.vllm.releases import find_contract, installed_versions
from fused_slots.vllm.releases.contract import check_methods
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedBlockTables

ROOT = Path(vllm.__file__).parent
V2_FOLDERS = ("v1/worker/gpu", "v1/hisparse", "v1/worker", "models", "model_executor/warmup")
OWN_FILES = ("v1/worker/gpu/block_table.py", "v1/worker/block_table.py")
V1_FILES = (
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_input_batch.py",
    "v1/worker/cpu_model_runner.py",
    "v1/worker/cp_utils.py",
    "v1/worker/mamba_utils.py",
    "model_executor/warmup/replayssm_warmup.py",
    "model_executor/warmup/qwen4_exp_qsa_warmup.py",
)


@cache
def parse(path: Path) -> ast.Module | None:
    """A file that mentions block tables."""
    text = path.read_text()
    return ast.parse(text) if "lock_table" in text or "BlockTables" in text else None


def sources(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted({p for folder in folders for p in (ROOT / folder).rglob("*.py")}):
        name, tree = path.relative_to(ROOT).as_posix(), parse(path)
        if name not in OWN_FILES and tree is not None:
            yield name, tree


def attributes_read(trees: Iterator[tuple[str, ast.Module]], variable: str) -> set[str]:
    """Names read off anything called `variable`, `self.variable`, `x[i].variable` ..."""
    return {
        node.attr
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).split(".")[-1].rstrip("]0123456789[")
        in (variable, f"_{variable}")
    }


def stock_v2(**changes: Any) -> Any:
    arguments = {
        "block_sizes": [4, 8],
        "max_num_reqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_blocks_per_group": [8, 4],
        "device": torch.device("cpu"),
    }
    return BlockTables(**arguments | changes), FusedBlockTables(**arguments | changes)


def test_every_attribute_of_the_v2_tables_that_vllm_reads_is_there() -> None:
    stock, ours = stock_v2()
    read = attributes_read(sources(V2_FOLDERS), "block_tables") & set(dir(stock))
    assert {"append_block_ids", "input_block_tables", "slot_mappings", "cp_rank"} <= read
    assert not read - set(dir(ours)), read - set(dir(ours))
    assert ours.block_sizes == stock.block_sizes == [4, 8]


def test_nobody_but_the_model_runner_builds_v2_tables() -> None:
    builders = {
        name
        for name, tree in sources(("v1", "models", "model_executor"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "BlockTables"
    }
    assert builders == {"v1/worker/gpu/model_runner.py"}


def test_nobody_asks_for_the_class_of_the_tables() -> None:
    for name, tree in sources(("v1", "models", "model_executor")):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                assert "BlockTables" not in ast.unparse(node), name
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "id", "") for base in node.bases}
                assert not bases & {"BlockTables", "MultiGroupBlockTable"}, name


def test_every_attribute_of_a_v1_table_that_vllm_reads_is_there() -> None:
    arguments = (4, 16, False, torch.device("cpu"), [4, 8], [8, 4])
    stock, ours = v1_module.MultiGroupBlockTable(*arguments), MultiGroupBlockTable(*arguments)
    trees = [(name, ast.parse((ROOT / name).read_text())) for name in V1_FILES]
    of_all = attributes_read(iter(trees), "block_table") & set(dir(stock))
    assert {"append_row", "commit_block_table", "block_tables"} <= of_all
    assert not of_all - set(dir(ours))
    of_one = set.union(
        *(attributes_read(iter(trees), v) for v in ("blk_table", "block_table", "bt"))
    )
    of_one &= set(dir(stock[0]))
    assert {"get_device_tensor", "slot_mapping", "max_num_blocks_per_req"} <= of_one
    assert not of_one - set(dir(ours[0]))
    public = {name for name in vars(stock[0]) if not name.startswith("_")}
    assert not public - set(dir(ours[0])), public - set(dir(ours[0]))


def test_our_signatures_are_those_of_the_installed_vllm() -> None:
    contract = find_contract(installed_versions())
    assert contract.name == "vllm 0.33"
    v2, v1 = (tables.methods for tables in contract.tables)
    check_methods(BlockTables, v2, contract.name)
    check_methods(v1_module.MultiGroupBlockTable, v1, contract.name)
    assert set(v2) == public_methods(BlockTables)
    known = set(v1) | {"__getitem__"}
    assert known == public_methods(v1_module.MultiGroupBlockTable)


def public_methods(owner: type) -> set[str]:
    ours = {"__init__", "__getitem__"}
    return {n for n, v in vars(owner).items() if callable(v) and (n in ours or n[0] != "_")}


def test_constants_are_vllms() -> None:
    assert fused_slots.PAD_SLOT_ID == PAD_SLOT_ID
    for mode in v1_module.SlotMappingMode:
        assert fused_slots.SlotMappingMode(mode.value).name == mode.name
    for blocks in range(40):
        for size in (1, 3, 8, 16, 48, 128, 200):
            for alignment in (None, 1, 128):
                assert fused_slots.get_block_table_width(
                    blocks, size, token_alignment=alignment
                ) == v1_module.get_block_table_width(blocks, size, token_alignment=alignment)


def pcp_step(tables: Any) -> tuple[list[Any], Any, Any]:
    """vLLM's own PCP manager over these tables: gathered rows of its own, and padded slots."""
    manager = PCPManager(2, 0, torch.device("cpu"), False, max_num_reqs=4, max_num_tokens=16)
    manager.set_block_tables(tables)
    dummy = [table.tolist() for table in manager.get_dummy_block_tables(3)]
    tables.append_block_ids(2, ([3, 5], [7]), overwrite=True)
    tables.append_block_ids(0, ([9], [1]), overwrite=True)
    tables.apply_staged_writes()
    manager._global_batch = SimpleNamespace(
        idx_mapping=torch.tensor([2, 0]),
        query_start_loc=torch.tensor([0, 4, 6], dtype=torch.int32),
        positions=torch.tensor([1, 2, 3, 4, 0, 1]),
        num_tokens=6,
    )
    manager._padded_gather_idx = torch.tensor([0, 3, 0, 5, 4, 0])
    manager._gathered_kv_write_mask = torch.tensor([True, True, False, True, True, False])
    local = SimpleNamespace(idx_mapping=torch.tensor([2, 2, 0, 0, 2]), num_reqs_after_padding=6)
    gathered, slots = manager.prepare_attn(local)
    assert [t.shape[0] for t in gathered] == [6, 6]
    return dummy, [table.tolist() for table in gathered], slots.tolist()


def test_vllms_pcp_manager_gets_the_same_from_both() -> None:
    stock, ours = stock_v2()
    expected = pcp_step(stock)
    assert pcp_step(ours) == expected
    assert expected[2][0] == [13, 20, -1, 37, 36, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_captured_draft_over_a_zeroed_index_maps_the_first_row(dtype: torch.dtype) -> None:
    stock, ours = stock_v2()
    for tables in (stock, ours):
        tables.append_block_ids(0, ([6], [2]), overwrite=True)
        tables.apply_staged_writes()
        tables.compute_slot_mappings(
            torch.zeros(4, dtype=dtype),
            torch.arange(5, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int64),
            8,
        )
    assert torch.equal(stock.slot_mappings, ours.slot_mappings)
    assert ours.slot_mappings[:, :5].tolist() == [[24] * 4 + [-1], [16] * 4 + [-1]]
