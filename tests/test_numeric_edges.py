"""Slots, ids, positions and addresses next to the limits of their types; cells nobody may read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import AscendBlockTables, BlockTableError, KVCacheGroup, SlotMappingMode
from fused_slots.host.packet import pack_writes
from fused_slots.host.staging import StagedWrites
from tests.backends_under_test import BACKENDS, MakeTables, batch_tensors, faults, gathered, slots
from tests.model import POISON

INT32_MAX = 2**31 - 1


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    made: MakeTables = request.param
    return made


# Memory that nobody may read


def test_poison_beyond_rows_tables_and_arena_gives_pad_and_faults(make_tables: MakeTables) -> None:
    groups = [KVCacheGroup(16, 8), KVCacheGroup(32, 4, 16), KVCacheGroup(4, 1, circular=True)]
    rows = {0: ([1, 2], [3], [4]), 1: ([], [], []), 3: ([5], [6], [])}
    tables = make_tables(groups, rows, max_num_batched_tokens=64)
    tables._backend.arena[tables.layout.offsets[-1] :] = POISON
    for g, table in enumerate(tables.block_tables):
        end = tables.layout.offsets[g] + table.gpu.numel()
        tables._backend.arena[end : tables.layout.offsets[g + 1]] = POISON
        for row in range(4):
            table.gpu[row, tables.num_blocks.np[g, row] :] = POISON
    batch = [(0, [0, 31, 32, 33, 500]), (1, [0, 17]), (3, [0, 16, 47, 127, 128]), (0, [10**12])]
    assert slots(tables, batch) == [
        [16, 47, -1, -1, -1, -1, -1, 80, -1, -1, -1, -1, -1],
        [96, 127, -1, -1, -1, -1, -1, 192, 208, -1, -1, -1, -1],
        [16, 19, 16, 17, 16, -1, -1, -1, -1, -1, -1, -1, 16],
    ]
    assert faults(tables) == [
        ("COLUMN_OUT_OF_ROW", 0, 10),
        ("COLUMN_OUT_OF_ROW", 1, 9),
        ("EMPTY_RING", 2, 7),
    ]
    for table, width in zip(gathered(tables, [0, 1, 3, 2]), (2, 2, 1), strict=True):
        assert not any(cell for row in table for cell in row[width:])
        assert not any(table[1] + table[3])


# Numeric edges


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("edge", [2**24, 2**30, 2**31])
@pytest.mark.parametrize("sizes", [(1, 1), (4, 4), (16, 16), (48, 16), (640, 128)])
def test_slots_next_to_an_edge_are_exact(
    make_tables: MakeTables, edge: int, sizes: tuple[int, int], slot_dtype: torch.dtype
) -> None:
    """Blocks just below, at and above the edge: exact slots, or a refused append."""
    block_size, kernel_size = sizes
    group = KVCacheGroup(block_size, 4, kernel_size)
    tables = make_tables([group], slot_dtype=slot_dtype, max_num_batched_tokens=64)
    at_edge = edge // block_size
    accepted = []
    for block_id in (at_edge - 1, at_edge, at_edge + 1):
        last_slot = (block_id + 1) * block_size - 1
        last_column = (block_id + 1) * (block_size // kernel_size) - 1
        if last_column > INT32_MAX or (slot_dtype is torch.int32 and last_slot > INT32_MAX):
            with pytest.raises(BlockTableError, match=str(block_id)):
                tables.append_block_ids(0, ([block_id],), overwrite=False)
        else:
            tables.append_block_ids(0, ([block_id],), overwrite=False)
            accepted.append(block_id)
    tables.apply_staged_writes()
    assert accepted
    offsets = sorted({0, 1 % block_size, kernel_size - 1, block_size // 2, block_size - 1})
    positions = [b * block_size + o for b in range(len(accepted)) for o in offsets]
    expected = [block_id * block_size + o for block_id in accepted for o in offsets]
    assert slots(tables, [(0, positions)]) == [expected]
    assert max(expected) >= edge - 1 - block_size


def test_an_int32_out_takes_states_of_any_id(make_tables: MakeTables) -> None:
    """They are no blocks of slots."""
    state = KVCacheGroup(2**20, 1, slot_mapping_mode=SlotMappingMode.NONE)
    tables = make_tables([state], {0: ([2**20],)}, slot_dtype=torch.int64)
    out = torch.full((1, 4), -7, dtype=torch.int32, device=tables.device)
    tables.compute_slot_mappings(*batch_tensors(tables, [(0, [3])]), 1, out=out)
    assert out.tolist() == [[-1] * 4]


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_an_int32_out_takes_the_last_block_that_fits_and_no_further(
    make_tables: MakeTables, block_size: int
) -> None:
    last = 2**31 // block_size - 1
    tables = make_tables([KVCacheGroup(block_size, 4)], {0: ([last],)}, slot_dtype=torch.int64)
    out = torch.full((1, 4), -7, dtype=torch.int32, device=tables.device)
    batch = batch_tensors(tables, [(0, [block_size - 1])])
    tables.compute_slot_mappings(*batch, 1, out=out)
    assert out.tolist() == [[(last + 1) * block_size - 1, -1, -1, -1]]
    if block_size == 1:
        return  # the id after the last one is no int32
    tables.append_block_ids(0, ([last + 1],), overwrite=False)
    with pytest.raises(BlockTableError, match=f"holds block {last + 1}, whose last slot is"):
        tables.compute_slot_mappings(*batch, 1, out=out)


@pytest.mark.parametrize("block_id", [2**27, 2**28 + 1, INT32_MAX])
def test_products_beyond_int32_are_exact_in_int64(make_tables: MakeTables, block_id: int) -> None:
    tables = make_tables([KVCacheGroup(16, 2)], {0: ([block_id],)}, slot_dtype=torch.int64)
    assert slots(tables, [(0, [0, 15])]) == [[block_id * 16, block_id * 16 + 15]]
    assert gathered(tables, [0])[0][0][0] == block_id


@pytest.mark.parametrize("position", [INT32_MAX - 1, INT32_MAX, INT32_MAX + 1, 2**40, 2**63 - 1])
def test_positions_beyond_int32_are_not_wrapped(make_tables: MakeTables, position: int) -> None:
    """A wrapped position would find a column; in a ring every position has a slot."""
    tables = make_tables([KVCacheGroup(4, 8), KVCacheGroup(4, 1, circular=True)], {0: ([7], [9])})
    paged, ring = slots(tables, [(0, [position])])
    assert paged == [-1]
    assert ring == [36 + position % 4]


@pytest.mark.parametrize("position", [-1, -2, -(2**31), -(2**63)])
def test_negative_positions_are_pad_in_every_group(make_tables: MakeTables, position: int) -> None:
    tables = make_tables([KVCacheGroup(4, 8), KVCacheGroup(4, 1, circular=True)], {0: ([7], [9])})
    assert slots(tables, [(0, [position])]) == [[-1], [-1]]
    assert faults(tables) == []


def test_a_row_whose_elements_begin_beyond_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """row x width >= 2^31: the last row of a table of 8 GiB, whose pages are touched lazily."""
    width, num_rows = 131_072, 16_385
    with open("/proc/meminfo") as file:
        available = int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    if available < 4 << 20:
        pytest.skip("needs 4 GiB of free memory")

    def lazily(self: Any, shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> torch.Tensor:
        if fill == 0:  # calloc: pages that nobody writes take no memory
            return torch.from_numpy(np.zeros(shape, dtype=str(dtype).removeprefix("torch.")))
        return torch.full(shape, fill, dtype=dtype)

    monkeypatch.setattr("fused_slots.backends.base.Backend.allocate", lazily)
    tables = AscendBlockTables.from_groups(
        [KVCacheGroup(1, width)], max_num_reqs=num_rows, max_num_batched_tokens=4
    )
    last = num_rows - 1
    assert last * width >= 2**31
    tables.append_block_ids(last, ([11, 12, 13],), overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(last, [0, 2, 3])]) == [[11, 13, -1]]
    assert gathered(tables, [last])[0][0][:4] == [11, 12, 13, 0]


def test_more_columns_than_int32_offsets_reach_are_refused() -> None:
    """The ids take no memory: all of them are the same element."""
    one = np.ones((1, 1), dtype=np.int64)
    writes = StagedWrites(
        rows=one[0],
        filled=one.astype(np.int32),
        counts=one,
        offsets=one,
        column_ids=np.broadcast_to(np.int32(7), INT32_MAX + 1),
        generations=one[0].astype(np.int32),
    )
    layout = AscendBlockTables.from_groups(
        [KVCacheGroup(16, 8)], max_num_reqs=2, max_num_batched_tokens=8, device="cpu"
    ).layout
    packet = np.zeros(8, dtype=np.int32)
    with pytest.raises(OverflowError, match="int32 offsets"):
        pack_writes(writes, layout, packet)
    with pytest.raises(ValueError, match="too small"):
        pack_writes(replace(writes, column_ids=writes.column_ids[:INT32_MAX]), layout, packet)
