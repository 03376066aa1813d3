"""Whatever defaults of torch and NumPy a caller has set, results are the same: inside of them, and
for a manager that was made inside and is used outside, or the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup, SlotMappingMode
from fused_slots.vllm.v1 import MultiGroupBlockTable
from tests.backends_under_test import BACKENDS, MakeTables, faults, gathered, int32, int64, slots

GROUPS = [
    KVCacheGroup(16, 8, name="full"),
    KVCacheGroup(64, 4, kernel_block_size=32, sliding_window_reach=40),
    KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(4, 1, circular=True, prefix_cacheable=False),
]
Defaults = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS: dict[str, Defaults] = {
    "with torch.device": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "numpy raises": lambda: np.errstate(all="raise"),
}


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    return request.param


def build(make_tables: MakeTables) -> AscendBlockTables:
    return make_tables(GROUPS, replay_window=4, checked=True)


def use(tables: AscendBlockTables) -> list[Any]:
    """Every call of a manager; what it gave."""
    seen: list[Any] = [tables.warmup().variants]
    for row, blocks in enumerate([[[5, 6], [3], [1], [7]], [[2], [4, 2], [9], [8]]]):
        tables.append_block_ids(row, blocks, overwrite=True)
    tables.apply_staged_writes()
    out = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in tables.input_block_tables
    ]
    seen += [gathered(tables, [1, 0]), gathered(tables, [1, 0, -1, -1], out=out)]
    seen.append(slots(tables, [(0, [0, 17]), (1, [2]), (-1, [0])], [0, 1, 0]))
    for step in range(3):
        tables.append_block_ids(0, [[10 + step], [], [], []], overwrite=False)
        block_tables, mapped = tables.step(
            int32(tables, [0, 1]),
            int32(tables, [0, 2, 3]),
            int64(tables, [40, 41 + 80 * step, 5]),
            num_reqs_padded=3,
            num_computed_tokens=int32(tables, [60, 0, 0, 0]),
        )
        seen += [[table.tolist() for table in block_tables], mapped.tolist()]
    seen.append(tables.map_tokens(int32(tables, [1, 0]), int64(tables, [3, 4])).tolist())
    seen += [table.tolist() for table in tables.get_dummy_block_tables(2)]
    seen.append(tables.get_dummy_slot_mappings(3).tolist())
    tables.check_integrity()
    seen += [str(tables.explain(0, 0, 17)), sorted(faults(tables))]
    tables.init_block_table_layout_tensors()
    tables.append_block_ids(0, [[5], [3], [1], [7]], overwrite=True)
    tables.step(int32(tables, [0]), int32(tables, [0, 1]), int64(tables, [3]))
    seen.append(tables.slot_mappings.tolist())
    return seen


@cache
def expected_of(make_tables: MakeTables) -> list[Any]:
    return use(build(make_tables))


@pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS.keys())
@pytest.mark.parametrize("inside", ["made", "used"])
def test_a_managers_results_depend_on_no_default(
    make_tables: MakeTables, defaults: Defaults, inside: str
) -> None:
    expected = expected_of(make_tables)
    with defaults() if inside == "made" else nullcontext():
        tables = build(make_tables)
    with defaults() if inside == "used" else nullcontext():
        assert use(tables) == expected


def use_v1(tables: MultiGroupBlockTable) -> list[Any]:
    """The calls of vLLM's v1 runner; what they gave."""
    tables.add_row(([3, 4], [5]), 0)
    tables.append_row(([7], []), 0)
    tables.commit_block_table(2)
    query_start_loc = torch.tensor([0, 3], dtype=torch.int32, device="cpu")
    positions = torch.tensor([0, 17, 40], device="cpu")
    tables.compute_slot_mapping(1, query_start_loc, positions)
    one = tables[1].slot_mapping.gpu[:4].tolist()
    tables[0].compute_slot_mapping(1, query_start_loc, positions)
    tables.restore_device_memory()
    return [
        one,
        *(table.get_device_tensor(2).tolist() for table in tables.block_tables),
        *(table.slot_mapping.gpu.tolist() for table in tables.block_tables),
    ]


@pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_v1_depends_on_no_default(defaults: Defaults) -> None:
    def build_v1() -> MultiGroupBlockTable:
        return MultiGroupBlockTable(4, 48, False, torch.device("cpu"), [16, 32], [16, 32])

    expected = use_v1(build_v1())
    with defaults():
        inside = build_v1()
        assert use_v1(inside) == expected
    assert use_v1(inside) == expected
