"""The v1 tables without vllm: rows, commit, slots, drafts and replay against the scalar oracle."""

from __future__ import annotations

import gc
import subprocess
import sys
from enum import Enum
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fused_slots import BlockTableError, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.reference import slot_mappings
from fused_slots.vllm.v1 import BlockTable, MultiGroupBlockTable

NONE, PAGED = SlotMappingMode.NONE, SlotMappingMode.TOKEN_TO_KV_SLOT
CAPACITY = 48


def make(**changes: Any) -> MultiGroupBlockTable:
    """Four rows; full attention, split blocks, and state."""
    arguments: dict[str, Any] = {
        "max_num_reqs": 4,
        "max_num_batched_tokens": CAPACITY,
        "pin_memory": False,
        "device": torch.device("cpu"),
        "block_sizes": [16, 32, 512],
        "max_num_blocks": [6, 3, 2],
        "kernel_block_sizes": [16, 8, 512],
        "slot_mapping_modes": [PAGED, PAGED, NONE],
    }
    return MultiGroupBlockTable(**(arguments | changes))


def starts(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def slots(tables: MultiGroupBlockTable, g: int, count: int) -> list[int]:
    return tables[g].slot_mapping.gpu[:count].tolist()


def test_rows_reach_the_device_with_the_commit_and_no_further_than_its_rows() -> None:
    tables = make()
    for row in (0, 1):
        tables.add_row(([3 + row, 4], [5], [6]), row)
    assert tables[0].block_table.np[:2, :2].tolist() == [[3, 4], [4, 4]]
    assert not tables[0].block_table.gpu.any()
    tables.commit_block_table(1)
    assert tables[0].get_device_tensor(2)[:, :2].tolist() == [[3, 4], [0, 0]]
    assert tables[1].block_table.gpu[0, :5].tolist() == [20, 21, 22, 23, 0]
    tables.commit_block_table(4)
    assert tables[0].get_device_tensor(2)[1, :2].tolist() == [4, 4]


@pytest.mark.parametrize("num_reqs", [2, 4])
def test_commit_uploads_what_a_caller_wrote_into_np(num_reqs: int) -> None:
    tables = make()
    for table in tables.block_tables:
        table.get_numpy_array()[:2, 0] = [7, 8]
    tables.commit_block_table(num_reqs)
    for table in tables.block_tables:
        assert table.block_table.gpu[:2, 0].tolist() == [7, 8]
        assert table.get_cpu_tensor()[:2, 0].tolist() == [7, 8]


def test_widths_are_aligned_except_for_state_groups() -> None:
    assert [table.max_num_blocks_per_req for table in make().block_tables] == [8, 16, 2]
    assert [table.block_table.gpu.shape[1] for table in make().block_tables] == [8, 16, 2]


def test_move_and_clear_leave_no_entry_behind_even_one_written_directly() -> None:
    tables = make()
    tables.add_row(([1, 2, 3, 4, 5], [6], [7]), 0)
    tables.add_row(([8, 9], [10, 11], [12, 13]), 1)
    tables[0].block_table.np[1, 7] = 99
    tables.move_row(1, 0)
    assert tables[0].block_table.np[0].tolist() == [8, 9, 0, 0, 0, 0, 0, 99]
    assert not tables[0].block_table.np[1].any()
    assert tables[0].num_blocks_per_row.tolist() == [2, 0, 0, 0]
    assert tables[1].num_blocks_per_row.tolist() == [8, 0, 0, 0]
    tables.clear_row(0)
    assert not any(table.block_table.np.any() for table in tables.block_tables)
    assert not any(table.num_blocks_per_row.any() for table in tables.block_tables)


def test_a_row_moved_onto_itself_stays() -> None:
    tables = make()
    tables.add_row(([1, 2], [3], [4]), 2)
    tables.move_row(2, 2)
    tables.swap_row(2, 2)
    assert tables[0].block_table.np[2, :3].tolist() == [1, 2, 0]
    assert tables[0].num_blocks_per_row[2] == 2


def test_a_row_started_anew_keeps_no_tail() -> None:
    tables = make()
    tables.add_row(([1, 2, 3], [4, 5], [6, 7]), 0)
    tables.add_row(([8], [], [9]), 0)
    assert tables[0].block_table.np[0].tolist() == [8, 0, 0, 0, 0, 0, 0, 0]
    assert not tables[1].block_table.np[0].any()
    assert tables[2].block_table.np[0].tolist() == [9, 0]


def test_swap_exchanges_rows_and_lengths() -> None:
    tables = make()
    tables.add_row(([1, 2, 3], [4], [5]), 0)
    tables.add_row(([6], [7, 8], [9, 10]), 3)
    tables.swap_row(0, 3)
    assert tables[0].block_table.np[[0, 3], :4].tolist() == [[6, 0, 0, 0], [1, 2, 3, 0]]
    assert tables[1].num_blocks_per_row.tolist() == [8, 0, 0, 4]
    assert tables[2].block_table.np[[0, 3]].tolist() == [[9, 10], [5, 0]]


BAD_CALLS = {
    "one group over its row": (lambda t: t.append_row(([1], [2], [3, 4]), 0), "3 > 2 .1 filled"),
    "one group alone over its row": (lambda t: t[2].append_row([3, 4], 0), "group 2.*3 > 2"),
    "a negative id": (lambda t: t.add_row(([1], [-2], [3]), 0), r"group 1, entry 0.*got -2"),
    "a negative id, one group": (lambda t: t[1].add_row([-2], 0), r"group 1, entry 0.*got -2"),
    "too few lists": (lambda t: t.append_row(([1], [2]), 0), "3 lists"),
    "no such row": (lambda t: t.append_row(([1], [2], [3]), 4), r"row in \[0, 4\).*got 4"),
    "a negative row": (lambda t: t[0].append_row([1], -1), r"row in \[0, 4\).*got -1"),
    "clear no such row": (lambda t: t.clear_row(9), "row_idx: expected a row"),
    "move from no such row": (lambda t: t.move_row(-1, 0), "src: expected a row"),
    "move to no such row": (lambda t: t.move_row(0, 4), "tgt: expected a row"),
    "swap no such row": (lambda t: t.swap_row(0, 4), "tgt: expected a row"),
    "commit too many": (lambda t: t.commit_block_table(5), r"num_reqs.*\[0, 4\]"),
    "compute too many": (
        lambda t: t.compute_slot_mapping(5, starts(0, 1, 2, 3, 4, 5), longs(0, 0, 0, 0, 0)),
        r"num_reqs.*\[0, 4\]",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_refused_call_changes_nothing(name: str) -> None:
    call, message = BAD_CALLS[name]
    tables = make()
    tables.add_row(([1, 2], [3], [4]), 0)
    before = [t.block_table.np.copy() for t in tables.block_tables]
    lengths = [t.num_blocks_per_row.copy() for t in tables.block_tables]
    with pytest.raises(BlockTableError, match=message):
        call(tables)
    for table, cells, filled in zip(tables.block_tables, before, lengths, strict=True):
        assert (table.block_table.np == cells).all()
        assert (table.num_blocks_per_row == filled).all()


def test_slots_follow_the_committed_rows_and_the_tail_is_padded() -> None:
    tables = make()
    tables.add_row(([3, 5], [2], [6]), 0)
    tables.add_row(([9], [7], [8]), 1)
    tables.commit_block_table(2)
    tables.append_row(([11], [], []), 1)
    tables.compute_slot_mapping(2, starts(0, 2, 4), longs(0, 17, 15, 16))
    assert slots(tables, 0, 6) == [48, 81, 159, -1, -1, -1]  # block 11 is not committed yet
    assert slots(tables, 1, 6) == [64, 81, 239, 240, -1, -1]
    assert slots(tables, 2, CAPACITY) == [-1] * CAPACITY
    tables.commit_block_table(2)
    tables.compute_slot_mapping(2, starts(0, 2, 4), longs(0, 17, 15, 16))
    assert slots(tables, 0, 4) == [48, 81, 159, 176]


def test_a_cleared_row_maps_nothing_once_committed() -> None:
    tables = make()
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(1)
    tables.clear_row(0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 1), longs(0))
    assert slots(tables, 0, 1) == [-1]


def test_all_groups_slots_are_one_launch() -> None:
    tables = make()
    manager = tables._storage.manager
    before = manager.launches
    tables.compute_slot_mapping(1, starts(0, 1), longs(0))
    assert manager.launches == before + 1


def test_lengths_are_sent_only_when_one_changed() -> None:
    tables = make()
    lengths = tables._storage.manager.num_blocks.gpu
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(1)
    writes = lengths._version
    tables.commit_block_table(2)
    assert lengths._version == writes
    tables.append_row(([4], [], []), 0)
    tables.commit_block_table(2)
    assert lengths._version == writes + 1
    assert lengths[:, 0].tolist() == [2, 4, 1]


def test_one_group_computed_alone_leaves_the_others_slots() -> None:
    tables = make()
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 1), longs(4))
    tables[0].compute_slot_mapping(1, starts(0, 2), longs(5, 6))
    assert slots(tables, 0, 3) == [53, 54, -1]
    assert slots(tables, 1, 3) == [68, -1, -1]
    tables[2].slot_mapping.gpu.fill_(5)
    tables[2].compute_slot_mapping(1, starts(0, 2), longs(5, 6))
    tables[2].compute_slot_mapping_draft(longs(0), longs(5))
    assert slots(tables, 2, CAPACITY) == [5] * CAPACITY


def test_one_group_committed_alone_leaves_the_others_lengths() -> None:
    tables = make()
    tables.add_row(([3], [2], [6]), 0)
    tables[1].commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 1), longs(4))
    assert (slots(tables, 0, 1), slots(tables, 1, 1)) == ([-1], [68])
    tables[0].commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 1), longs(4))
    assert (slots(tables, 0, 1), slots(tables, 1, 1)) == ([52], [68])


def test_a_table_of_its_own_does_what_the_group_of_many_does() -> None:
    table = BlockTable(
        32, 4, 3, CAPACITY, False, torch.device("cpu"), 1, PAGED, kernel_block_size=8
    )
    assert table.max_num_blocks_per_req == 12
    assert (table.block_size, table.kv_cache_block_size, table.blocks_per_kv_block) == (8, 32, 4)
    assert table.use_hybrid_blocks
    table.add_row([2, 3], 1)
    table.move_row(1, 0)
    table.append_row([5], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping(1, starts(0, 3), longs(0, 31, 95))
    assert table.slot_mapping.gpu[:4].tolist() == [64, 95, 191, -1]
    table.swap_row(0, 3)
    assert table.num_blocks_per_row.tolist() == [0, 0, 0, 12]
    table.clear_row(3)
    table.clear()
    assert not table.get_cpu_tensor().any()
    assert not table.get_device_tensor().any()


def test_clear_keeps_lengths_for_a_caller_who_restores_the_tables() -> None:
    tables = make()
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(1)
    saved = [(t.block_table.gpu.clone(), t.block_table.cpu.clone()) for t in tables.block_tables]
    tables.clear()
    for table, (gpu, cpu) in zip(tables.block_tables, saved, strict=True):
        assert not table.block_table.gpu.any()
        assert not table.block_table.np.any()
        table.block_table.gpu.copy_(gpu)
        table.block_table.cpu.copy_(cpu)
    tables.append_row(([4], [], []), 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 2), longs(1, 16))
    assert slots(tables, 0, 2) == [49, 64]


def test_buffers_keep_their_addresses_and_types() -> None:
    tables = make()
    addresses = [
        (t.block_table.gpu.data_ptr(), t.slot_mapping.gpu.data_ptr()) for t in tables.block_tables
    ]
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(4)
    tables.compute_slot_mapping(1, starts(0, 1), longs(0))
    for table, (rows, mapping) in zip(tables.block_tables, addresses, strict=True):
        assert (table.block_table.gpu.data_ptr(), table.slot_mapping.gpu.data_ptr()) == (
            rows,
            mapping,
        )
        assert table.block_table.gpu.is_contiguous()
        assert table.block_table.gpu.dtype == torch.int32
        assert table.slot_mapping.gpu.dtype == torch.int64
        assert table.slot_mapping.gpu.shape == (CAPACITY,)


def test_slots_are_born_pad() -> None:
    assert all(slots(make(), g, CAPACITY) == [-1] * CAPACITY for g in range(3))


def test_buffers_copy_both_ways() -> None:
    buffer = make()[0].block_table
    buffer.np[:2, 0] = [5, 6]
    buffer.copy_to_gpu(1)
    assert buffer.gpu[:2, 0].tolist() == [5, 0]
    buffer.gpu[1, 0] = 9
    buffer.copy_to_cpu()
    assert buffer.np[:2, 0].tolist() == [5, 9]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_drafts_map_flat_pairs_and_pad_the_rest(kind: Any) -> None:
    tables = make()
    tables.add_row(([3, 5], [2], [6]), 0)
    tables.add_row(([9], [7], [8]), 1)
    tables.commit_block_table(2)
    tables.compute_slot_mapping(2, starts(0, 4, 8), longs(0, 1, 2, 3, 4, 5, 6, 7))
    tables.compute_slot_mapping_draft(kind([0, 1, 0]), kind([18, 2, 1]))
    assert slots(tables, 0, 5) == [82, 146, 49, -1, -1]
    assert slots(tables, 1, 5) == [82, 226, 65, -1, -1]
    assert slots(tables, 2, 5) == [-1] * 5


def test_drafts_with_a_list_of_its_own_per_group() -> None:
    tables = make()
    tables.add_row(([3, 5], [2], [6]), 0)
    tables.commit_block_table(1)
    rows = [np.array([0, 0]), np.array([0]), np.array([0])]
    positions = [np.array([1, 18]), np.array([2]), np.array([0])]
    tables.compute_slot_mapping(1, starts(0, 1), longs(0), positions, rows)
    assert slots(tables, 0, 3) == [49, 82, -1]
    assert slots(tables, 1, 3) == [66, -1, -1]


def test_padding_replayed_slots_is_what_the_folded_replay_gives() -> None:
    tables = make(
        block_sizes=[4, 4],
        max_num_blocks=[4, 4],
        kernel_block_sizes=None,
        slot_mapping_modes=None,
        prefix_cacheable=[True, False],
        replay_window=4,
    )
    tables.add_row(([3, 5, 9], [1, 6, 7]), 0)
    tables.add_row(([2, 4], [8, 10]), 1)
    tables.commit_block_table(2)
    batch = (2, starts(0, 6, 8), longs(4, 5, 6, 7, 8, 9, 4, 5))
    replay_start = torch.tensor([4, 0], dtype=torch.int32)
    tables.compute_slot_mapping(*batch)
    plain = slots(tables, 1, 9)
    tables.pad_replayed_slots(*batch, replay_start, 4)
    padded = [slots(tables, g, 9) for g in range(2)]
    assert padded[0] == [-1, -1, -1, -1, 36, 37, 16, 17, -1]
    assert padded[1] == plain
    tables.compute_slot_mapping(*batch, replay_start=replay_start)
    assert [slots(tables, g, 9) for g in range(2)] == padded
    tables.pad_replayed_slots(0, starts(0), longs(), replay_start, 4)
    tables.pad_replayed_slots(1, starts(0, 1), longs(4, 4), replay_start, 4)
    assert slots(tables, 0, 2) == [-1, -1]


class ForeignMode(Enum):
    """As vLLM's own enumeration, which the runner passes."""

    TOKEN_TO_KV_SLOT = "token_to_kv_slot"
    NONE = "none"


def test_modes_of_another_enumeration_are_understood_and_kept() -> None:
    modes = [ForeignMode.TOKEN_TO_KV_SLOT, ForeignMode.TOKEN_TO_KV_SLOT, ForeignMode.NONE]
    tables = make(slot_mapping_modes=modes)
    assert [table.slot_mapping_mode for table in tables.block_tables] == modes
    assert tables[2].max_num_blocks_per_req == 2


@pytest.mark.parametrize("name", ["max_num_blocks", "kernel_block_sizes", "slot_mapping_modes"])
def test_a_list_of_the_wrong_length_is_refused(name: str) -> None:
    value = [PAGED] if name == "slot_mapping_modes" else [8]
    with pytest.raises(BlockTableError, match=f"{name}: expected 3 entries"):
        make(**{name: value})


def test_map_to_kernel_blocks() -> None:
    ids = np.array([3, 0, 5])
    expected = [6, 7, 0, 1, 10, 11]
    assert BlockTable.map_to_kernel_blocks(ids, 2).tolist() == expected
    assert BlockTable.map_to_kernel_blocks(ids, 2, np.arange(2).reshape(1, -1)).tolist() == expected
    assert BlockTable.map_to_kernel_blocks(ids, 1).tolist() == [3, 0, 5]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's groups as a runner under context parallelism finds them; PCP is not initialised."""
    module = ModuleType("vllm.distributed")
    group = SimpleNamespace(world_size=2, rank_in_group=1)

    def get_pcp_group() -> None:
        raise AssertionError("prefill context parallel group is not initialized")

    module.get_dcp_group = lambda: group  # type: ignore[attr-defined]
    module.get_pcp_group = get_pcp_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed", module)
    return module


def test_context_parallel_size_and_rank_come_from_vllm(distributed: ModuleType) -> None:
    tables = make(cp_kv_cache_interleave_size=4)
    assert (tables[0].dcp_world_size, tables[0].dcp_rank) == (2, 1)
    assert (tables[0].pcp_world_size, tables[0].pcp_rank) == (1, 0)
    assert tables[0].cp_kv_cache_interleave_size == 4
    tables.add_row(([3], [2], [6]), 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, starts(0, 4), longs(0, 4, 7, 12))
    assert slots(tables, 0, 4) == [-1, 48, 51, 52]


def test_without_vllm_there_is_one_rank() -> None:
    assert "vllm.distributed" not in sys.modules
    assert (make()[0].dcp_world_size, make()[0].dcp_rank) == (1, 0)


class Registry:
    """As vLLM's registry of kernels to compile before serving."""

    kernels: ClassVar[list[Any]] = []

    @classmethod
    def register(cls, kernel: Any) -> None:
        cls.kernels.append(kernel)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[Registry]:
    module = ModuleType("vllm.model_executor.warmup.jit_warmup")
    module.JitWarmupRegistry = Registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Registry, "kernels", [])
    return Registry


def test_vllms_warm_up_compiles_our_kernels(
    registry: type[Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make()
    (kernel,) = registry.kernels
    warmed: list[str] = []
    manager = tables._storage.manager
    monkeypatch.setattr(manager, "warmup", lambda: warmed.append("all"))
    kernel.compile_many(kernel.get_warmup_keys())
    assert warmed == ["all"]
    monkeypatch.setenv("FUSED_SLOTS_WARMUP", "0")
    make()
    assert registry.kernels == [kernel]
    assert make().warmup().seconds >= 0


def test_vllms_warm_up_keeps_no_replaced_tables_alive(registry: type[Registry]) -> None:
    tables = make()
    (kernel,) = registry.kernels
    assert len(kernel.get_warmup_keys()) == 1
    del tables
    gc.collect()
    assert kernel.get_warmup_keys() == []
    kernel.compile("gone")


def random_tables(rng: Random) -> tuple[MultiGroupBlockTable, list[KVCacheGroup], Any]:
    """Groups of random sizes, kinds and sharding, and the tables of them."""
    groups = []
    for _ in range(rng.randint(1, 4)):
        kernel_size = rng.choice([1, 3, 4, 8, 16])
        state = rng.random() < 0.2
        groups.append(
            KVCacheGroup(
                block_size=kernel_size * (1 if state else rng.choice([1, 2, 3])),
                max_num_blocks=rng.randint(1, 6),
                kernel_block_size=kernel_size,
                slot_mapping_mode=NONE if state else PAGED,
            )
        )
    tables = MultiGroupBlockTable(
        5,
        CAPACITY,
        False,
        "cpu",
        [group.block_size for group in groups],
        [group.max_num_blocks for group in groups],
        slot_mapping_modes=[group.slot_mapping_mode for group in groups],
        kernel_block_sizes=[group.kernel_block_size for group in groups],
    )
    return tables, groups, [[[] for _ in groups] for _ in range(5)]


@pytest.mark.parametrize("seed", range(40))
def test_random_row_operations_agree_with_plain_lists_and_the_oracle(seed: int) -> None:
    rng = Random(seed)
    tables, groups, rows = random_tables(rng)
    for _ in range(60):
        operation = rng.choice(["add", "append", "append", "clear", "move", "swap", "one"])
        a, b = rng.randrange(5), rng.randrange(5)
        ids = [[rng.randint(0, 99) for _ in range(rng.randint(0, 2))] for _ in groups]
        if operation in ("add", "append"):
            old = [[] for _ in groups] if operation == "add" else rows[a]
            new = [x + y for x, y in zip(old, ids, strict=True)]
            fits = all(len(r) <= g.max_num_blocks for r, g in zip(new, groups, strict=True))
            call = tables.add_row if operation == "add" else tables.append_row
            if fits:
                call(tuple(ids), a)
                rows[a] = new
        elif operation == "one":
            g = rng.randrange(len(groups))
            if len(rows[a][g]) + len(ids[g]) <= groups[g].max_num_blocks:
                tables[g].append_row(ids[g], a)
                rows[a][g] = rows[a][g] + ids[g]
        elif operation == "clear":
            tables.clear_row(a)
            rows[a] = [[] for _ in groups]
        elif operation == "move" and a != b:
            tables.move_row(a, b)
            rows[b], rows[a] = rows[a], [[] for _ in groups]
        elif operation == "swap":
            tables.swap_row(a, b)
            rows[a], rows[b] = rows[b], rows[a]
        check_batch(rng, tables, groups, rows)


def check_batch(rng: Random, tables: Any, groups: list[KVCacheGroup], rows: Any) -> None:
    num_reqs = rng.randint(0, 5)
    lengths = [rng.randint(0, 4) for _ in range(num_reqs)]
    offsets = [sum(lengths[:b]) for b in range(num_reqs + 1)]
    longest = max(g.block_size * g.max_num_blocks for g in groups)
    positions = [rng.randint(-1, longest) for _ in range(offsets[-1])]
    tables.commit_block_table(num_reqs)
    tables.compute_slot_mapping(num_reqs, starts(*offsets), longs(*positions))
    columns = [
        [
            [k * g.columns_per_block + i for k in row[n] for i in range(g.columns_per_block)]
            for row in rows
        ]
        for n, g in enumerate(groups)
    ]
    expected = slot_mappings(
        groups, columns, range(num_reqs), offsets, positions, CAPACITY, ContextParallel()
    )
    for g, table in enumerate(tables.block_tables):
        assert table.slot_mapping.gpu.tolist() == expected[g]
        for row in range(5):
            filled = columns[g][row]
            width = table.max_num_blocks_per_req
            assert table.block_table.np[row].tolist() == filled + [0] * (width - len(filled))
        assert (table.block_table.gpu[:num_reqs].numpy() == table.block_table.np[:num_reqs]).all()


def test_importing_v1_imports_no_vllm() -> None:
    code = "import sys, fused_slots.vllm.v1; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
