"""Where our tables differ from vLLM's on purpose; docs/vllm.md lists each of them.

Each test shows both sides, so that it also fails when vLLM's side changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker import block_table as v1_module
from vllm.v1.worker.gpu.block_table import BlockTables

from fused_slots.faults import FaultCode, RowCapacityError
from fused_slots.vllm.v1 import MultiGroupBlockTable
from fused_slots.vllm.v2 import FusedBlockTables

Tables = Any


def both(widths: list[int], block_size: int = 16, **changes: Any) -> tuple[Tables, Tables]:
    """vLLM's tables and ours."""
    arguments: dict[str, Any] = {
        "block_sizes": [block_size] * len(widths),
        "max_num_reqs": 2,
        "max_num_batched_tokens": 8,
        "max_num_blocks_per_group": widths,
        "device": torch.device("cpu"),
    }
    return BlockTables(**arguments | changes), FusedBlockTables(**arguments | changes)


def fill(tables: Tables, *rows: list[int]) -> None:
    for row, ids in enumerate(rows):
        groups = tables.num_kv_cache_groups
        tables.append_block_ids(row, tuple([ids] * groups), overwrite=True)
    tables.apply_staged_writes()


def slots(tables: Tables, row: int, *positions: int) -> list[int]:
    count = len(positions)
    return tables.compute_slot_mappings(
        torch.tensor([row]), torch.tensor([0, count], dtype=torch.int32),
        torch.tensor(positions), count,
    )[0].tolist()  # fmt: skip


def gathered(tables: Tables, rows: list[int], padded: int = 2) -> list[Any]:
    return [t.tolist() for t in tables.gather_block_tables(torch.tensor(rows), padded)]


def test_a_column_outside_the_row_is_pad_and_counted() -> None:
    theirs, ours = both([1])
    for tables in (theirs, ours):
        fill(tables, [5], [9])
    assert slots(theirs, 0, 0, 16) == [80, 144]  # the neighbour's block
    assert slots(ours, 0, 0, 16) == [80, -1]
    (fault,) = ours.take_faults()
    assert (fault.code, fault.count) == (FaultCode.COLUMN_OUT_OF_ROW, 1)


def test_a_stale_entry_beyond_the_rows_columns_is_pad() -> None:
    theirs, ours = both([4])
    for tables in (theirs, ours):
        fill(tables, [3, 5, 9])
        fill(tables, [7])
    assert slots(theirs, 0, 5, 20) == [117, 84]  # block 5, which somebody else may have by now
    assert slots(ours, 0, 5, 20) == [117, -1]


def test_a_negative_position_is_pad() -> None:
    theirs, ours = both([4])
    for tables in (theirs, ours):
        fill(tables, [3], [5])
    assert slots(theirs, 1, -3) != [-1]
    assert slots(ours, 1, -3) == [-1]


def test_an_empty_row_maps_to_pad_and_not_to_the_null_block() -> None:
    theirs, ours = both([4])
    assert slots(theirs, 0, 0, 1) == [0, 1]
    assert slots(ours, 0, 0, 1) == [-1, -1]


def test_the_tail_of_a_gathered_row_is_zero() -> None:
    theirs, ours = both([4])
    for tables in (theirs, ours):
        fill(tables, [3, 5, 9], [7])
        gathered(tables, [0])
    assert gathered(theirs, [1], 1) == [[[7, 5, 9, 0]]]  # what row 0 left there
    assert gathered(ours, [1], 1) == [[[7, 0, 0, 0]]]


def test_a_dummy_request_gathers_a_zero_row() -> None:
    """vLLM's gather reads row -1 of its tables, memory in front of them: not run here."""
    _, ours = both([4])
    fill(ours, [3], [7])
    assert gathered(ours, [-1, 1]) == [[[0, 0, 0, 0], [7, 0, 0, 0]]]


def test_slots_are_born_pad() -> None:
    theirs, ours = both([4])
    assert not theirs.slot_mappings.any()
    assert (ours.slot_mappings == -1).all()


def test_a_slot_beyond_int32_is_exact() -> None:
    theirs, ours = both([4])
    for tables in (theirs, ours):
        fill(tables, [134217728])
    assert slots(theirs, 0, 0) == [-2147483648]
    assert slots(ours, 0, 0) == [2147483648]


def test_a_row_over_capacity_changes_no_group() -> None:
    theirs, ours = both([4, 2])
    with pytest.raises(RuntimeError, match="exceeds row capacity"):
        theirs.append_block_ids(0, ([1, 2, 3], [4, 5, 6]), overwrite=True)
    assert theirs.num_blocks.np[:, 0].tolist() == [3, 0]
    with pytest.raises(RowCapacityError, match="3 > 2"):
        ours.append_block_ids(0, ([1, 2, 3], [4, 5, 6]), overwrite=True)
    assert ours.num_blocks.np[:, 0].tolist() == [0, 0]


def test_redirected_writes_are_the_same() -> None:
    """Not a difference: elastic EP's warm-up writes to the null block in both."""
    theirs, ours = both([4, 4])
    for tables in (theirs, ours):
        tables.redirect_writes_to_null_block = True
        fill(tables, [3, 5], [7])
        tables.redirect_writes_to_null_block = False
    assert slots(theirs, 0, 1, 17) == slots(ours, 0, 1, 17) == [1, 1]
    assert gathered(theirs, [0, 1]) == gathered(ours, [0, 1])
    assert theirs.num_blocks.np.tolist() == ours.num_blocks.np.tolist() == [[2, 1], [2, 1]]


def both_v1(modes: list[Any] | None = None) -> tuple[Tables, Tables]:
    arguments = (3, 8, False, torch.device("cpu"), [16, 16], [8, 8], 1, modes)
    return v1_module.MultiGroupBlockTable(*arguments), MultiGroupBlockTable(*arguments)


def compute_v1(tables: Tables, *positions: int) -> None:
    starts = torch.tensor([0, len(positions)], dtype=torch.int32)
    tables.compute_slot_mapping(1, starts, torch.tensor(positions))


def test_v1_a_state_groups_slots_become_pad() -> None:
    mode = v1_module.SlotMappingMode
    theirs, ours = both_v1([mode.TOKEN_TO_KV_SLOT, mode.NONE])
    for tables in (theirs, ours):
        tables.add_row(([3], [4]), 0)
        tables.commit_block_table(1)
        tables[1].slot_mapping.gpu.fill_(5)
        compute_v1(tables, 0, 1)
    assert theirs[1].slot_mapping.gpu.tolist() == [5] * 8
    assert ours[1].slot_mapping.gpu.tolist() == [-1] * 8


def test_v1_a_row_started_anew_keeps_no_tail() -> None:
    theirs, ours = both_v1()
    for tables in (theirs, ours):
        tables.add_row(([3, 5], [4, 6]), 0)
        tables.add_row(([7], [8]), 0)
    assert theirs[0].block_table.np[0, :2].tolist() == [7, 5]
    assert ours[0].block_table.np[0, :2].tolist() == [7, 0]


def test_v1_a_moved_row_leaves_no_tail_in_its_target() -> None:
    theirs, ours = both_v1()
    for tables in (theirs, ours):
        tables.add_row(([1, 2, 3], [1, 2, 3]), 0)
        tables.add_row(([8, 9], [8, 9]), 1)
        tables.move_row(1, 0)
        assert not tables[0].block_table.np[1].any()
    assert theirs[0].block_table.np[0, :4].tolist() == [8, 9, 3, 0]
    assert ours[0].block_table.np[0, :4].tolist() == [8, 9, 0, 0]


def test_v1_a_column_that_the_row_has_not_filled_is_pad() -> None:
    theirs, ours = both_v1()
    for tables in (theirs, ours):
        tables.add_row(([3], [4]), 0)
        tables.commit_block_table(1)
        compute_v1(tables, 1, 16)
    assert theirs[0].slot_mapping.gpu[:2].tolist() == [49, 0]
    assert ours[0].slot_mapping.gpu[:2].tolist() == [49, -1]


def test_v1_a_row_over_capacity_is_a_typed_error_and_changes_no_group() -> None:
    theirs, ours = both_v1()
    too_many = list(range(1, 10))
    with pytest.raises(ValueError, match="could not broadcast"):
        theirs.append_row(([1], too_many), 0)
    assert theirs[0].num_blocks_per_row[0] == 1
    with pytest.raises(RowCapacityError, match="9 > 8"):
        ours.append_row(([1], too_many), 0)
    assert ours[0].num_blocks_per_row[0] == 0


def test_v1_a_row_moved_onto_itself_stays() -> None:
    theirs, ours = both_v1()
    for tables in (theirs, ours):
        tables.add_row(([3], [4]), 0)
        tables.move_row(0, 0)
    assert theirs[0].num_blocks_per_row[0] == 0
    assert ours[0].num_blocks_per_row[0] == 1
