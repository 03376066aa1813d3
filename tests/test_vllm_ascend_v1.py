"""vllm-ascend's v1 tables over ours, with specs that pose as vLLM's.

tests/releases runs them beside vllm-ascend's own.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import BlockTableError
from fused_slots.vllm import ascend_v1, releases
from fused_slots.vllm.ascend_v1 import (
    FusedAscendMultiGroupBlockTable,
    FusedAscendTables023,
    FusedAscendTables024,
    FusedAscendTables026,
    FusedAscendTables027,
    FusedAscendTables028,
)
from tests.test_vllm_v1 import longs, starts

CAPACITY = 24
ALL = (
    FusedAscendMultiGroupBlockTable,
    FusedAscendTables028,
    FusedAscendTables027,
    FusedAscendTables026,
    FusedAscendTables024,
    FusedAscendTables023,
)


class FullAttentionSpec:
    pass


class MambaSpec:
    pass


class CircularBufferSpec:
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any] = field(default_factory=dict)


def groups_of(*specs: Any) -> list[Any]:
    return [SimpleNamespace(kv_cache_spec=spec) for spec in specs]


def make(
    table_class: Any = FusedAscendMultiGroupBlockTable, **changes: Any
) -> FusedAscendMultiGroupBlockTable:
    """Three rows of full attention in split blocks, state, and a ring."""
    arguments: dict[str, Any] = {
        "max_num_reqs": 3,
        "max_model_len": 96,
        "max_num_batched_tokens": CAPACITY,
        "pin_memory": False,
        "device": torch.device("cpu"),
        "block_sizes": [32, 96, 8],
        "kernel_sizes": [16, 0, 4],
        "kv_cache_groups": groups_of(FullAttentionSpec(), MambaSpec(), CircularBufferSpec()),
    }
    return table_class(**(arguments | changes))  # type: ignore[no-any-return]


def slots(tables: FusedAscendMultiGroupBlockTable, g: int, count: int) -> list[int]:
    return tables[g].slot_mapping.gpu[:count].tolist()


def filled(*arguments: Any, **changes: Any) -> FusedAscendMultiGroupBlockTable:
    tables = make(*arguments, **changes)
    tables.add_row(([3, 5], [7], [9]), 0)
    tables.commit_block_table(1)
    return tables


@pytest.mark.parametrize("contract", releases.ASCEND_CONTRACTS, ids=lambda c: c.name)
def test_every_class_takes_its_contracts_arguments_and_has_what_is_read(contract: Any) -> None:
    tables = next(tables for tables in contract.tables if tables.runner == "v1")
    stand_in = tables.load_stand_in()
    built = stand_in(**make_arguments(tables.methods["__init__"]))
    for name, arguments in tables.methods.items():
        known = list(inspect.signature(getattr(stand_in, name)).parameters)
        assert [name for name in known if name in arguments] == list(arguments)
    for name in tables.read_outside:
        assert hasattr(built, name) or hasattr(built[0], name), name


def make_arguments(names: tuple[str, ...]) -> dict[str, Any]:
    values = (3, 96, CAPACITY, False, torch.device("cpu"), [32], 2, [3], [[16]], 1, None)
    return dict(zip(names, values, strict=True))


def test_the_kinds_of_groups_and_what_is_read_of_their_tables() -> None:
    tables = make()
    assert [table.is_mamba_group for table in tables.block_tables] == [False, True, False]
    assert [table.is_circular for table in tables.block_tables] == [False, False, True]
    assert [table.physical_block_size for table in tables.block_tables] == [32, 96, 8]
    assert [table.logical_block_size for table in tables.block_tables] == [16, 96, 8]
    assert [table.blocks_per_phys_block for table in tables.block_tables] == [2, 1, 1]
    assert [table.max_num_blocks_per_req for table in tables.block_tables] == [3, 1, 1]
    assert [table.block_table.gpu.shape[1] for table in tables.block_tables] == [6, 1, 1]
    assert [table.kernel_sizes for table in tables.block_tables] == [[16], [0], [8]]


@pytest.mark.parametrize(
    ("table_class", "drafts", "width"),
    [
        *((FusedAscendMultiGroupBlockTable, n, w) for n, w in ((0, 24), (1, 24), (4, 33))),
        *((FusedAscendTables026, n, w) for n, w in ((0, 24), (4, 33))),
        *((FusedAscendTables024, n, w) for n, w in ((0, 30), (4, 30))),
        *((FusedAscendTables023, n, w) for n, w in ((0, 30), (4, 39))),
    ],
)
def test_slots_are_int32_in_buffers_as_wide_as_the_releases(
    table_class: Any, drafts: int, width: int
) -> None:
    tables = filled(table_class, num_speculative_tokens=drafts)
    for table in tables.block_tables:
        for tensor in (table.slot_mapping.gpu, table.slot_mapping.cpu):
            assert (tensor.shape, tensor.dtype) == ((width,), torch.int32)
        assert table.slot_mapping.np.shape == (width,)
        assert (
            table.slot_mapping.gpu.data_ptr() % 512 == tables[0].slot_mapping.gpu.data_ptr() % 512
        )
        assert table.max_num_batched_tokens == CAPACITY
    tables.compute_slot_mapping(1, starts(0, width), longs(*[40] * width))
    assert slots(tables, 0, width) == [168] * width


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_state_has_no_slots_and_a_ring_is_mapped_beside_other_groups(dtype: torch.dtype) -> None:
    tables = filled()
    positions = longs(0, 33, 9, -1).to(dtype)
    tables.compute_slot_mapping(1, starts(0, 4), positions)
    assert slots(tables, 0, 5) == [96, 161, 105, -1, -1]
    assert slots(tables, 1, 5) == [-1] * 5
    assert slots(tables, 2, 5) == [72, 73, 73, -1, -1]
    tables[0].compute_slot_mapping(1, starts(0, 1), positions)
    assert slots(tables, 0, 2) == [96, -1]


@pytest.mark.parametrize(
    ("table_class", "mapped"),
    [(FusedAscendMultiGroupBlockTable, False), (FusedAscendTables028, True)],
)
def test_a_ring_by_itself_and_its_drafts_are_as_the_release_has_them(
    table_class: Any, mapped: bool
) -> None:
    ring = [72, 73, -1] if mapped else [-1, -1, -1]
    tables = filled(table_class)
    tables[2].compute_slot_mapping(1, starts(0, 2), longs(0, 9))
    assert slots(tables, 2, 3) == ring
    tables[2].slot_mapping.gpu.fill_(5)
    tables[2].compute_slot_mapping_draft(np.array([0, 0]), np.array([0, 9]))
    assert slots(tables, 2, 3) == ring
    tables.compute_slot_mapping_draft(np.array([0, 0]), np.array([0, 9]))
    assert slots(tables, 2, 3) == ring
    assert slots(tables, 0, 3) == [96, 105, -1]
    alone = make(
        table_class,
        block_sizes=[8, 96],
        kernel_sizes=None,
        kv_cache_groups=groups_of(CircularBufferSpec(), MambaSpec()),
    )
    alone.add_row(([9], [7]), 0)
    alone.commit_block_table(1)
    alone.compute_slot_mapping(1, starts(0, 2), longs(0, 9))
    assert slots(alone, 0, 3) == ring
    assert alone[0].is_circular
    assert alone[0].block_table.gpu[0].tolist() == [9]


@pytest.mark.parametrize("table_class", [FusedAscendTables023, FusedAscendTables027])
def test_before_0_28_a_ring_is_a_group_as_any(table_class: Any) -> None:
    tables = make(table_class, max_num_blocks=[3, 1, 12])
    assert [table.block_table.gpu.shape[1] for table in tables.block_tables] == [6, 1, 24]
    assert not tables[2].is_circular


@pytest.mark.parametrize("table_class", ALL)
def test_a_group_of_several_layer_types_is_of_their_kind(table_class: Any) -> None:
    states = UniformTypeKVCacheSpecs({"a": MambaSpec(), "b": MambaSpec()})
    both = UniformTypeKVCacheSpecs({"a": MambaSpec(), "b": FullAttentionSpec()})
    tables = make(table_class, kv_cache_groups=groups_of(states, both, UniformTypeKVCacheSpecs()))
    newest = not table_class.rules.compressed_rows
    assert [table.is_mamba_group for table in tables.block_tables] == [newest, False, False]


@pytest.mark.parametrize("table_class", ALL)
def test_rows_of_compressed_layers_are_shorter_up_to_0_26(table_class: Any) -> None:
    spec = UniformTypeKVCacheSpecs({"a": SimpleNamespace(compress_ratio=4), "b": MambaSpec()})
    for blocks, compressed in ((30, 8), (3, 1)):
        tables = make(
            table_class,
            block_sizes=[32],
            kernel_sizes=[16],
            max_num_blocks=[blocks],
            kv_cache_groups=groups_of(spec),
        )
        expected = compressed if table_class.rules.compressed_rows else blocks
        assert tables[0].max_num_blocks_per_req == expected
        assert tables[0].block_table.gpu.shape == (3, 2 * expected)


def test_the_first_candidate_that_divides_the_block_is_its_kernels() -> None:
    tables = make(block_sizes=[32, 64, 8], kernel_sizes=[[128, 0, 16, 8]], kv_cache_groups=None)
    assert [table.block_size for table in tables.block_tables] == [16, 16, 8]
    whole = make(kernel_sizes=None, kv_cache_groups=None)
    assert [table.block_size for table in whole.block_tables] == [32, 96, 8]
    with pytest.raises(
        BlockTableError, match=r"kernel_sizes\[1\]: .*block_sizes\[1\] .96.*\[7, 64\]"
    ):
        make(kernel_sizes=[[16], [7, 64], [8]])
    with pytest.raises(BlockTableError, match="kernel_sizes: expected 3 entries"):
        make(kernel_sizes=[16, 16])
    with pytest.raises(BlockTableError, match="max_num_blocks: expected 3 entries"):
        make(max_num_blocks=[3])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for module in (ascend_v1, sys.modules["fused_slots.vllm.v1_table"]):
        monkeypatch.setattr(module, "parallel_group", lambda name: found.get(name, (1, 0)))
    return found


def test_decode_context_parallelism_without_drafts_is_served(
    ranks: dict[str, tuple[int, int]],
) -> None:
    ranks["dcp"] = (2, 1)
    specs = groups_of(FullAttentionSpec(), MambaSpec())
    changes = {"block_sizes": [32, 96], "kernel_sizes": [16, 0], "kv_cache_groups": specs}
    tables = make(**changes)
    assert [table.max_num_blocks_per_req for table in tables.block_tables] == [2, 1]
    tables.add_row(([3], [7]), 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 4), longs(0, 1, 3, 63))
    assert slots(tables, 0, 5) == [-1, 96, 97, 127, -1]
    # Up to 0.26 state's rows hold every rank's blocks.
    older = make(FusedAscendTables026, **changes, max_num_blocks=[2, 3])
    assert [table.max_num_blocks_per_req for table in older.block_tables] == [2, 6]


def test_what_cannot_be_right_is_refused(ranks: dict[str, tuple[int, int]]) -> None:
    ranks["dcp"] = (2, 0)
    with pytest.raises(BlockTableError, match=r"num_speculative_tokens under decode.*got 1"):
        make(num_speculative_tokens=1, kv_cache_groups=None)
    with pytest.raises(BlockTableError, match=r"kv_cache_groups\[2\] under decode.*no circular"):
        make()
    ranks["pcp"] = (4, 0)
    with pytest.raises(BlockTableError, match=r"prefill_context_parallel_size: .*got 4"):
        make()


@pytest.mark.parametrize(("built_for", "refused"), [("_310P", True), ("A2", False), (None, False)])
def test_the_310p_is_told_by_what_the_package_was_built_for(
    built_for: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if built_for is not None:
        module = ModuleType("vllm_ascend._build_info")
        module.__device_type__ = built_for  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
        monkeypatch.setitem(sys.modules, "vllm_ascend._build_info", module)
    assert ascend_v1.is_310p() is refused


def test_a_commit_of_0_23_is_a_snapshot_of_the_rows() -> None:
    for table_class in ALL:
        storage = make(table_class)._storage
        assert not storage._snapshot_rows  # the CPU's copy is done when it returns
    assert FusedAscendTables023.rules.snapshot_rows
    assert not any(cls.rules.snapshot_rows for cls in ALL if cls is not FusedAscendTables023)


def test_what_may_change_at_once_is_copied_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = make(FusedAscendTables023)._storage
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **keywords: empty(*a, **keywords))
    monkeypatch.setattr(storage, "pinned", True)
    sent: list[torch.Tensor] = []
    target: Any = SimpleNamespace(copy_=lambda source, non_blocking: sent.append(source))
    row = torch.tensor([1, 2])
    for snapshot, aside in ((False, False), (False, True), (True, False)):
        monkeypatch.setattr(storage, "_snapshot_rows", snapshot)
        storage._send(row, target, aside)
    assert [source.data_ptr() == row.data_ptr() for source in sent] == [True, False, False]
    assert all(source.tolist() == [1, 2] for source in sent)
