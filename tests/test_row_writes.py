"""Rows that are cleared, cut, and written from a block on; null blocks; a length of replay each.

Every test runs on each backend of this process; tests/kernels/interpreted runs them on kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import KVCacheGroup, SlotMappingMode
from fused_slots.faults import BlockIdError, BlockTableError, InvalidArgumentError, RowCapacityError
from tests.backends_under_test import (
    BACKENDS,
    MakeTables,
    batch_tensors,
    faults,
    gathered,
    int32,
    int64,
    slots,
)

PAGED = KVCacheGroup(16, 8, name="full")
SPLIT = KVCacheGroup(32, 4, kernel_block_size=16)
STATE = KVCacheGroup(64, 3, slot_mapping_mode=SlotMappingMode.NONE)
RING = KVCacheGroup(4, 1, circular=True)
GROUPS = [PAGED, SPLIT, STATE]
ROWS = {0: [[5, 6, 7], [4, 8], [2, 3]], 1: [[9], [1], [6]]}


@pytest.fixture(params=BACKENDS, ids=str, name="make_tables")
def _make_tables(request: pytest.FixtureRequest) -> MakeTables:
    return request.param


def narrow(rows: list[Any]) -> list[Any]:
    """Gathered rows up to their last live column."""
    return [[table[0][: max(np.flatnonzero(table[0]), default=-1) + 1]] for table in rows]


def test_a_row_given_back_is_empty_everywhere(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    gathered(tables, [0, 1])
    tables.clear_row(np.int64(0))
    assert tables.num_blocks.np[:, 0].tolist() == [0, 0, 0]
    assert tables.num_blocks.gpu[:, 0].tolist() == [3, 4, 2]  # not applied yet
    tables.apply_staged_writes()
    assert tables.num_blocks.gpu[:, 0].tolist() == [0, 0, 0]
    assert tables.block_tables[2].gpu[0].tolist() == [0, 0, 0]  # kernels read it by row
    assert not any(any(table[0]) for table in gathered(tables, [0, 1]))
    assert slots(tables, [(0, [0]), (1, [0])]) == [[-1, 144], [-1, 32], [-1, -1]]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1), ("COLUMN_OUT_OF_ROW", 1, 1)]
    tables.append_block_ids(0, [[3], [], [1]], overwrite=False)
    tables.apply_staged_writes()
    assert narrow(gathered(tables, [0])) == [[[3]], [[]], [[1]]]


def test_a_state_row_that_was_longer_once_is_cleared_whole(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.append_block_ids(0, [[], [], [1]], overwrite=True)
    tables.apply_staged_writes()
    tables.clear_row(0)
    tables.append_block_ids(1, [[2], [], []], overwrite=False)  # in the same launch
    tables.apply_staged_writes()
    assert tables.block_tables[2].gpu[:2].tolist() == [[0, 0, 0], [6, 0, 0]]
    assert narrow(gathered(tables, [1])) == [[[9, 2]], [[2, 3]], [[6]]]


def test_a_tail_is_cut_replaced_and_grown_again(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    gathered(tables, [0])
    for first, ids, expected in (
        ([1, 2, 2], [[], [], []], [[5], [8, 9, 16, 17], [2, 3]]),
        ([1, 1, 0], [[1, 2], [3], [9]], [[5, 1, 2], [8, 9, 6, 7], [9]]),
        ([3, 2, 1], [[4], [], []], [[5, 1, 2, 4], [8, 9, 6, 7], [9]]),
        ([2, 0, 1], [[6], [5, 6], [7, 8]], [[5, 1, 6], [10, 11, 12, 13], [9, 7, 8]]),
        ([0, 0, 0], [[], [], []], [[], [], []]),
    ):
        tables.write_block_ids(0, np.array(first), ids)
        tables.apply_staged_writes()
        assert narrow(gathered(tables, [0])) == [[row] for row in expected]
        assert tables.num_blocks.gpu[:, 0].tolist() == [len(row) for row in expected]


def test_writes_of_one_step_come_out_as_one(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.append_block_ids(0, [[1, 2], [], []], overwrite=False)
    tables.write_block_ids(0, [4, 2, 2], [[], [], [4]])  # within what is staged
    tables.append_block_ids(0, [[8], [], []], overwrite=False)
    tables.write_block_ids(0, [2, 1, 3], [[4], [], []])  # below what the device has
    launches = tables.launches
    step = batch_tensors(tables, [(0, [47, 48]), (1, [3])])
    rows, mapped = tables.step(*step)
    assert tables.launches == launches + 1
    assert narrow([table.tolist() for table in rows]) == [[[5, 6, 4]], [[8, 9]], [[2, 3, 4]]]
    assert mapped[:, :3].tolist() == [[79, -1, 147], [-1, -1, 35], [-1, -1, -1]]


def test_a_redirected_write_holds_the_null_block(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.redirect_writes_to_null_block = True
    tables.write_block_ids(0, [1, 1, 1], [[8, 9], [3], [7]])
    tables.apply_staged_writes()
    assert tables.block_tables[0].gpu[0, :3].tolist() == [5, 0, 0]
    assert tables.block_tables[1].gpu[0, :4].tolist() == [8, 9, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((9, [0, 0, 0], [[], [], []]), InvalidArgumentError, r"req_index: .*\[0, 4\); got 9"),
        ((True, [0, 0, 0], [[], [], []]), InvalidArgumentError, "req_index.*got True"),
        ((0, [0, 0], [[], [], []]), InvalidArgumentError, "first_blocks.*3 numbers.*got 2"),
        ((0, 0, [[], [], []]), InvalidArgumentError, "first_blocks.*3 numbers.*got int"),
        ((0, [0, 0, 0], [[], []]), InvalidArgumentError, "new_block_ids.*3 lists.*got 2"),
        (
            (0, [4, 0, 0], [[1], [], []]),
            InvalidArgumentError,
            r"first_blocks of request row 0, group 0 \(full\): .*\[0, 3\].*holds 3 blocks; got 4",
        ),
        ((0, [0, -1, 0], [[], [], []]), InvalidArgumentError, "group 1.*got -1"),
        ((0, [0, 0, False], [[], [], []]), InvalidArgumentError, "group 2.*got False"),
        ((0, [0, 1.0, 0], [[], [], []]), InvalidArgumentError, "group 1.*got 1.0"),
        ((0, [1, 1, 1], [[1], [2], [-1]]), BlockIdError, "group 2, entry 0.*got -1"),
        ((0, [1, 1, 1], [[1], [2.5], [1]]), BlockIdError, "group 1, entry 0.*an int; got 2.5"),
        ((0, [3, 0, 0], [[1] * 6, [], []]), RowCapacityError, r"group 0 \(full\).*9 > 8"),
    ],
)
def test_a_refused_write_changes_nothing(
    make_tables: MakeTables, arguments: Any, error: type[BlockTableError], message: str
) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.append_block_ids(1, [[1], [], []], overwrite=False)
    before = tables.num_blocks.np.copy(), tables._rows.packet_size, tables._rows.generations.copy()
    with pytest.raises(error, match=message):
        tables.write_block_ids(*arguments)
    after = tables.num_blocks.np, tables._rows.packet_size, tables._rows.generations
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("row", [-1, 4, True, 1.0, None, "0", 2**70])
def test_a_row_that_is_none_is_not_cleared(make_tables: MakeTables, row: Any) -> None:
    tables = make_tables(GROUPS, ROWS)
    with pytest.raises(InvalidArgumentError, match=r"req_index: expected a row in \[0, 4\)"):
        tables.clear_row(row)
    assert not tables._rows.pending


def test_the_null_block_is_not_written_and_counted(make_tables: MakeTables) -> None:
    groups, rows = [PAGED, SPLIT, RING], {0: [[0, 7], [0, 1], [0]], 1: [[3], [7], [6]]}
    tables = make_tables(groups, rows, null_block_id=0, checked=True)
    batch = [(0, [3, 16, 40]), (1, [0])]
    assert slots(tables, batch) == [[-1, 112, -1, 48], [-1, -1, 40, 224], [-1, -1, -1, 24]]
    told = [(f.code.name, f.group, f.count, f.token) for f in tables.take_faults()]
    expected = [("COLUMN_OUT_OF_ROW", 0, 1, 2), ("NULL_BLOCK", 0, 1, 0)]
    expected += [("NULL_BLOCK", 1, 1, t) for t in (0, 1)]
    expected += [("NULL_BLOCK", 2, 1, t) for t in range(3)]
    assert sorted(told) == sorted(expected)
    # Row 0 of group 1 holds columns 0 and 1: two blocks, or one block of two columns.
    off = make_tables(groups, rows)
    assert slots(off, batch)[0] == [3, 112, -1, 48]
    assert faults(off) == [("COLUMN_OUT_OF_ROW", 0, 1)]


def test_drafts_leave_the_null_block_alone(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[6, 0]], 1: [[5]]}, null_block_id=6)
    mapped = tables.map_tokens(int32(tables, [0, 0, 1]), int64(tables, [2, 17, 2]))
    assert mapped.tolist() == [[-1, 1, 82]]
    assert faults(tables) == [("NULL_BLOCK", 0, 1)]


def replayed(tables: Any, batch: Any, start: Any, length: Any, step: bool) -> list[list[int]]:
    arguments = batch_tensors(tables, batch)
    keywords = {"replay_start": int32(tables, start), "replay_len": int32(tables, length)}
    num_tokens = len(arguments[2])
    if step:
        result = tables.step(*arguments, num_tokens_padded=num_tokens, **keywords)[1]
    else:
        result = tables.compute_slot_mappings(*arguments, num_tokens, **keywords)
    return result.tolist()


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_each_request_has_its_length_of_replay(
    make_tables: MakeTables, window: int, step: bool
) -> None:
    groups = [PAGED, KVCacheGroup(16, 4, prefix_cacheable=False)]
    rows = {row: [[row + 1], [row + 1]] for row in range(4)}
    tables = make_tables(groups, rows, replay_window=window, max_num_batched_tokens=12)
    batch = [(0, [0, 1, 2]), (1, [4, 5, 6]), (2, [0, 1]), (3, [0, 1, 2])]
    start, length = [0, 5, 1, -2], [2, 1, -7, 4]
    free = [16, 17, 18, 36, 37, 38, 48, 49, 64, 65, 66]
    kept = [-1, -1, 18, 36, -1, 38, 48, 49, -1, -1, 66]
    assert replayed(tables, batch, start, length, step) == [kept, free]
    assert replayed(tables, batch, [0] * 4, [0] * 4, step) == [free, free]


def test_replay_at_the_edges_of_int32(make_tables: MakeTables) -> None:
    """Sums of a start and a length leave int32; positions are int64."""
    tables = make_tables([PAGED], {0: [[1]]})
    far = [2**31 - 9, 2**31 - 8, 2**31, 2**32 - 10, 2**32 - 9, 2**40, 2**63 - 1]
    for start, length, covered in (
        (2**31 - 8, 2**31 - 1, [1, 2, 3]),
        (2**31 - 8, 8, [1]),
        (-(2**31), 2**31 - 1, []),
        (-(2**31), -(2**31), []),
    ):
        assert replayed(tables, [(0, far)], [start], [length], False) == [[-1] * len(far)]
        assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, len(far) - len(covered))]
    assert replayed(tables, [(0, [0, 1, 2])], [-(2**31)], [2**31 - 1], False) == [[16, 17, 18]]
    assert replayed(tables, [(0, [0, 1, 2])], [-3], [2**31 - 1], False) == [[-1, -1, -1]]
    window = make_tables([PAGED], {0: [[1]]}, replay_window=8)
    arguments = batch_tensors(window, [(0, [2**31, 2**31 + 100, 2**40])])
    window.compute_slot_mappings(*arguments, 3, replay_start=int32(window, [2**31 - 8]))
    assert faults(window) == [("COLUMN_OUT_OF_ROW", 0, 3)]


def test_a_row_out_of_range_is_counted_once_in_a_step(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    tables.step(*batch_tensors(tables, [(0, [0]), (4, [0, 1])]))
    assert faults(tables) == [("ROW_OUT_OF_RANGE", g, 1) for g in range(3)]


def test_a_length_without_a_start_is_refused(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[1]]})
    arguments = batch_tensors(tables, [(0, [0])])
    length = int32(tables, [1])
    for call in (
        lambda: tables.step(*arguments, replay_len=length),
        lambda: tables.compute_slot_mappings(*arguments, 1, replay_len=length),
    ):
        with pytest.raises(InvalidArgumentError, match="replay_len: expected replay_start beside"):
            call()
    start = int32(tables, [1])
    with pytest.raises(InvalidArgumentError, match=r"replay_len: expected torch\.int32"):
        tables.step(*arguments, replay_start=start, replay_len=int64(tables, [1]))
    with pytest.raises(InvalidArgumentError, match=r"replay_len: expected shape \[>= 1\]"):
        tables.step(*arguments, replay_start=start, replay_len=int32(tables, []))


def test_computed_tokens_below_zero_null_nothing(make_tables: MakeTables) -> None:
    window = KVCacheGroup(16, 8, sliding_window_reach=2**31 - 1)
    tables = make_tables([window], {0: [[5, 6]]})
    for computed in (-2, -(2**31), 0, 2**31 - 1):
        got = gathered(tables, [0], num_computed_tokens=int32(tables, [computed] * 4))
        assert got[0][0][:3] == [5, 6, 0]


def test_what_a_caller_wrote_is_gone_after_invalidate_gathered(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[5, 6]]})
    gathered(tables, [0])
    tables.input_block_tables[0][0, 1] = -1
    tables.input_block_tables[0][0, 3] = 9
    tables.input_block_tables[0][3, 7] = 9  # beyond every batch so far
    tables.invalidate_gathered()
    assert gathered(tables, [0])[0] == [[5, 6, 0, 0, 0, 0, 0, 0]]
    assert tables.input_block_tables[0][1:].sum() == 0


@pytest.mark.parametrize("garbage", [-7, 3, 2**31 - 1, -(2**31)])
def test_memory_that_came_back_with_anything_in_it(make_tables: MakeTables, garbage: int) -> None:
    """Rows that are overwritten, and everything about them, are as in a new manager."""
    groups = [PAGED, SPLIT, STATE, RING]
    rows = {row: [[row + 1] * 3, [row + 1] * 2, [row + 1], [row + 1]] for row in range(4)}
    tables = make_tables(groups, rows, null_block_id=0)
    gathered(tables, [0, 1, 2, 3])
    tables.clear_row(1)
    backend = tables._backend
    lost = [value for value in vars(backend).values() if isinstance(value, torch.Tensor)]
    for tensor in lost:
        tensor.fill_(garbage)
    tables.init_block_table_layout_tensors()
    assert tables.take_faults() == []
    tables.append_block_ids(0, [[9], [2], [1], [6]], overwrite=True)
    tables.apply_staged_writes()
    assert tables.num_blocks.gpu.tolist() == tables.num_blocks.np.tolist()
    assert tables.block_tables[2].gpu[0].tolist() == [1, 0, 0]  # state kernels read it by row
    assert narrow(gathered(tables, [0])) == [[[9]], [[4, 5]], [[1]], [[6]]]
    assert slots(tables, [(0, [3, 17, 5])]) == [
        [147, -1, 149],
        [67, 81, 69],
        [-1, -1, -1],
        [27, 25, 25],
    ]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]
    assert not any(any(row) for table in gathered(tables, [-1, 1]) for row in table)
    tables.append_block_ids(2, [[3], [], [], []], overwrite=False)  # a row that is lost
    tables.clear_row(3)
    tables.step(*batch_tensors(tables, [(2, [0, 60]), (3, [0])]))
    assert tables.block_tables[2].gpu[3].tolist() == [0, 0, 0]
    assert narrow(gathered(tables, [3])) == [[[]], [[]], [[]], [[]]]


def test_restoring_shows_no_cell_before_it_is_written(make_tables: MakeTables) -> None:
    """Nor afterwards: the next gather takes what has been written since."""
    tables = make_tables(GROUPS, ROWS)
    tables.append_block_ids(0, [[8], [], [1]], overwrite=True)
    tables.apply_staged_writes()  # blocks 6 and 7 may be another request's by now
    tables.append_block_ids(0, [[4], [3], [7]], overwrite=False)
    tables.write_block_ids(1, [0, 0, 0], [[2, 3], [], [5]])
    tables.init_block_table_layout_tensors()
    assert narrow(gathered(tables, [0])) == [[[8]], [[]], [[1]]]
    assert slots(tables, [(0, [0, 16]), (1, [0])])[:2] == [[128, -1, -1], [-1, -1, -1]]
    tables.apply_staged_writes()
    assert narrow(gathered(tables, [0])) == [[[8, 4]], [[6, 7]], [[1, 7]]]
    assert narrow(gathered(tables, [1])) == [[[2, 3]], [[]], [[5]]]


def test_restoring_what_was_not_lost_changes_nothing(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, ROWS)
    before = gathered(tables, [0, 1])
    slots(tables, [(0, [127])])
    tables.append_block_ids(1, [[4], [], []], overwrite=False)
    tables.init_block_table_layout_tensors()
    assert faults(tables) == []  # the counts alone begin anew
    tables.apply_staged_writes()
    assert gathered(tables, [0, -1])[0][0] == before[0][0]
    assert gathered(tables, [1])[0][0][:3] == [9, 4, 0]
    tables.clear_row(0)
    tables.apply_staged_writes()
    assert tables.block_tables[2].gpu[:2].tolist() == [[0, 0, 0], [6, 0, 0]]  # not the next row
