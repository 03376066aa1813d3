"""Batches that the host of a device cannot see to be wrong: PAD or mapped, and counted once."""

from __future__ import annotations

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from tests.backends_under_test import MakeTables, faults, int32, int64

PAGED = KVCacheGroup(64, 12)
STATE = KVCacheGroup(4, 1, slot_mapping_mode=SlotMappingMode.NONE)
ROWS = {row: [[10 * row + 1, 10 * row + 2], [row]] for row in range(4)}


def make(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> AscendBlockTables:
    """A manager whose host looks into no tensor, as that of a GPU."""
    tables = make_tables([PAGED, STATE], ROWS, max_num_batched_tokens=300, **settings)
    monkeypatch.setattr(tables._backend, "reads_tensors_on_host", False)
    tables.slot_mappings.fill_(-77)
    return tables


def mapped(
    tables: AscendBlockTables, rows: list[int], starts: list[int], positions: list[int],
    expected: int, step: bool,
) -> list[int]:  # fmt: skip
    """The first group's slots, whole, from `step` or from `compute_slot_mappings`."""
    batch = int32(tables, rows), int32(tables, starts), int64(tables, positions)
    if step:
        tables.step(*batch, num_tokens_padded=expected)
    else:
        tables.compute_slot_mappings(*batch, expected)
    assert set(tables.slot_mappings[1].tolist()) == {-1}
    slots: list[int] = tables.slot_mappings[0].tolist()
    return slots


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("first", [1, 3, 260])
def test_tokens_before_the_first_request_are_padded(
    make_tables: MakeTables, plan: str, monkeypatch: pytest.MonkeyPatch, first: int, step: bool
) -> None:
    """Whether lengths are guessed (all are equal) or searched."""
    for lens in ([2, 2], [2, 1]):
        tables = make(make_tables, monkeypatch)
        starts = [first, first + lens[0], first + sum(lens)]
        positions = [5] * first + [0, 1, 4, 5][: sum(lens)]
        slots = mapped(tables, [2, 1], starts, positions, starts[-1], step)
        behind = [-1] * (300 - starts[-1])
        assert slots == [-1] * first + [1344, 1345, 708, 709][: sum(lens)] + behind
        assert faults(tables) == []


@pytest.mark.parametrize("step", [False, True])
def test_a_view_narrower_than_the_batch_is_one_fault_a_call(
    make_tables: MakeTables, plan: str, monkeypatch: pytest.MonkeyPatch, step: bool
) -> None:
    tables = make(make_tables, monkeypatch)
    for expected in (5, 6, 7):
        slots = mapped(tables, [0, 1], [0, 3, 6], [0, 1, 2] * 2, expected, step)
        assert slots[:7] == [64, 65, 66, 704, 705, 706, -1]
    assert faults(tables) == [("TOKENS_OVER_VIEW", 0, 1), ("TOKENS_OVER_VIEW", 1, 1)]


def test_drafts_are_as_many_as_they_are(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[1]]})
    tables.map_tokens(int32(tables, [0, 0]), int64(tables, [0, 1]))
    assert faults(tables) == []


@pytest.mark.parametrize("step", [False, True])
def test_a_row_out_of_range_is_counted_once(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch, step: bool
) -> None:
    """A step by entry, in its gather; slots alone by token."""
    tables = make(make_tables, monkeypatch, checked=True)
    mapped(tables, [0, 9], [0, 1, 4], [0, 1, 2, 3], 4, step)
    told = [(f.code.name, f.group, f.row, f.token, f.count) for f in tables.take_faults()]
    if step:
        assert sorted(told) == [("ROW_OUT_OF_RANGE", g, 9, -1, 1) for g in (0, 1)]
    else:
        assert sorted(told) == [("ROW_OUT_OF_RANGE", 0, 9, t, 1) for t in (1, 2, 3)]


@pytest.mark.parametrize("step", [False, True])
def test_repeated_positions_are_told_in_checked_mode(
    make_tables: MakeTables, plan: str, monkeypatch: pytest.MonkeyPatch, step: bool
) -> None:
    """Of one entry, at any distance; dummies and other entries have positions of their own."""
    lens = [4, 140, 3, 2]
    positions = [3, 0, 3, 3, *range(5), *range(130), 1, *range(200, 204), 0, 1, 2, 7, 7]
    starts = [sum(lens[:b]) for b in range(5)]
    for checked in (True, False):
        tables = make(make_tables, monkeypatch, checked=checked)
        for row in range(3):  # all positions have slots
            tables.append_block_ids(row, [[1, 2, 3, 4], []], overwrite=True)
        tables.apply_staged_writes()
        mapped(tables, [0, 1, 2, -1], starts, positions, sum(lens), step)
        told = [f for f in tables.take_faults() if f.code.name == "DUPLICATE_POSITION"]
        repeats = [2, 3, *range(9, 14), 139] if checked else []
        assert sorted(f.token for f in told) == repeats
        assert {f.group for f in told} <= {0}


def test_far_positions_and_sizes_are_no_overflow(make_tables: MakeTables) -> None:
    """Numbers that leave int32 where kernels hold them are held at its end."""
    window = KVCacheGroup(4, 4, sliding_window_reach=2**31 - 1, dcp_sharded=False)
    state = KVCacheGroup(2**31 - 1, 1, slot_mapping_mode=SlotMappingMode.NONE)
    tables = make_tables(
        [window, state],
        {0: [[3], [7]]},
        replay_window=2**31 - 1,
        context_parallel=ContextParallel(2, 0, 1),
    )
    far = torch.tensor([0, 5, 2**31 - 1, 2**31])
    slots = tables.compute_slot_mappings(
        int32(tables, [0]), int32(tables, [0, 4]), far, 4, replay_start=int32(tables, [1])
    )
    assert slots.tolist() == [[12, -1, -1, -1], [-1] * 4]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]
    computed = int32(tables, [2**31 - 1] * 4)
    gathered = tables.gather_block_tables(int32(tables, [0]), 1, num_computed_tokens=computed)
    assert [table[0, 0].item() for table in gathered] == [3, 7]
