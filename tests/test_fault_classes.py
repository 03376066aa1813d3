"""Every class of fault that engines of this kind have had, at its smallest, with the right values.

The numbers are literals worked out by hand from the definition of the mapping, so that no code of
this project, the oracle included, has a say in what is right.
"""

from __future__ import annotations

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.faults import ConfigurationError, InvalidArgumentError, RowCapacityError
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

PAGED = KVCacheGroup(block_size=16, max_num_blocks=8)
RING = KVCacheGroup(block_size=4, max_num_blocks=1, circular=True)
STATE = KVCacheGroup(block_size=4096, max_num_blocks=1, slot_mapping_mode=SlotMappingMode.NONE)


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    return request.param


# A group of one unaligned column, as vLLM's constructor allows, lies next to its neighbour's.
def test_column_outside_the_row_is_padded_and_counted(make_tables: MakeTables) -> None:
    group = KVCacheGroup(block_size=128, max_num_blocks=1)
    tables = make_tables([group], {0: [[5]], 1: [[9]], 3: [[2]]})
    assert tables.input_block_tables[0].shape == (4, 1)
    assert slots(tables, [(0, [0, 128])]) == [[640, -1]]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]
    assert slots(tables, [(3, [127, 128])]) == [[383, -1]]  # the last row has no neighbour


def test_column_outside_a_row_of_one_column_taken_as_given(make_tables: MakeTables) -> None:
    tables = AscendBlockTables(
        block_sizes=[16],
        max_num_reqs=2,
        max_num_batched_tokens=4,
        max_num_blocks_per_group=[1],
        device=make_tables.device,
    )
    tables.append_block_ids(0, [[5]], overwrite=True)
    tables.append_block_ids(1, [[9]], overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(0, [0, 16])]) == [[80, -1]]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 1)]


def test_column_beyond_the_filled_ones_is_padded_although_the_row_is_wide(
    make_tables: MakeTables,
) -> None:
    tables = make_tables([PAGED], {0: [[5, 6]]})
    tables.append_block_ids(0, [[5]], overwrite=True)  # column 1 still holds block 6
    tables.apply_staged_writes()
    assert slots(tables, [(0, [15, 16, 31])]) == [[95, -1, -1]]
    assert faults(tables) == [("COLUMN_OUT_OF_ROW", 0, 2)]


def test_one_block_ring_wraps_and_never_reads_other_columns(make_tables: MakeTables) -> None:
    tables = make_tables([RING], {0: [[7]], 1: [[3]]})
    assert slots(tables, [(0, [0, 3, 4, 130, 8192])]) == [[28, 31, 28, 30, 28]]
    assert faults(tables) == []


def test_ring_of_negative_positions_is_padded(make_tables: MakeTables) -> None:
    tables = make_tables([RING], {0: [[7]]})
    assert slots(tables, [(0, [-1, -1, 5])]) == [[-1, -1, 29]]
    assert slots(tables, [(0, [-1, -1, -1])]) == [[-1, -1, -1]]
    assert faults(tables) == []


def test_ring_without_a_block_is_padded_and_counted(make_tables: MakeTables) -> None:
    tables = make_tables([RING], {0: [[7]]})
    assert slots(tables, [(1, [0, 5]), (0, [1])]) == [[-1, -1, 29]]
    assert faults(tables) == [("EMPTY_RING", 0, 2)]


def test_over_capacity_stages_nothing_for_any_group(make_tables: MakeTables) -> None:
    groups = [
        KVCacheGroup(block_size=16, max_num_blocks=32, name="full"),
        KVCacheGroup(block_size=16, max_num_blocks=16, name="window"),
    ]
    tables = make_tables(groups, {2: [[1], [2]]})
    ids = [list(range(10, 27)), list(range(30, 47))]
    with pytest.raises(RowCapacityError, match=r"row 2, group 1 \(window\).*17 > 16") as raised:
        tables.append_block_ids(2, ids, overwrite=True)
    assert "max_num_blocks" in raised.value.hint
    with pytest.raises(RowCapacityError, match=r"18 > 16 \(1 filled, 17 new\)"):
        tables.append_block_ids(2, ids, overwrite=False)
    assert tables.num_blocks.np[:, 2].tolist() == [1, 1]
    launches = tables.launches
    tables.apply_staged_writes()
    assert tables.launches == launches
    assert gathered(tables, [2])[0][0][:3] == [1, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_replicated_group_is_whole_on_every_rank(make_tables: MakeTables, rank: int) -> None:
    group = KVCacheGroup(block_size=16, max_num_blocks=8, dcp_sharded=False)
    tables = make_tables([group], {0: [[4, 6]]}, context_parallel=ContextParallel(2, rank))
    assert slots(tables, [(0, [0, 1, 2, 3, 17])]) == [[64, 65, 66, 67, 97]]


@pytest.mark.parametrize(("rank", "expected"), [(0, [64, -1, 65, -1]), (1, [-1, 64, -1, 65])])
def test_sharded_group_is_dealt_to_the_ranks(
    make_tables: MakeTables, rank: int, expected: list[int]
) -> None:
    tables = make_tables([PAGED], {0: [[4, 6]]}, context_parallel=ContextParallel(2, rank))
    assert slots(tables, [(0, [0, 1, 2, 3])]) == [expected]
    # Positions 32 and 33 open the second virtual block of 2 x 16 tokens.
    assert slots(tables, [(0, [32 + rank])]) == [[96]]
    assert faults(tables) == []


@pytest.mark.parametrize("interleave", [24, 3, 32])
def test_interleave_that_does_not_divide_the_block_is_refused(
    make_tables: MakeTables, interleave: int
) -> None:
    with pytest.raises(ConfigurationError, match=rf"block_size \(16\).*got {interleave}"):
        make_tables([PAGED], context_parallel=ContextParallel(2, 0, interleave))


def test_overwriting_a_longer_row_leaves_no_tail(make_tables: MakeTables) -> None:
    """What moving row 1 onto row 0 and clearing row 1 comes to in the v2 interface."""
    tables = make_tables([PAGED], {0: [[1, 2, 3, 4, 5]], 1: [[8, 9]]})
    assert gathered(tables, [0, 1])[0][0][:6] == [1, 2, 3, 4, 5, 0]
    tables.append_block_ids(0, [[8, 9]], overwrite=True)
    tables.append_block_ids(1, [[]], overwrite=True)
    tables.apply_staged_writes()
    assert gathered(tables, [0, 1]) == [[[8, 9, 0, 0, 0, 0, 0, 0], [0] * 8]]


def test_padding_begins_at_the_tokens_and_not_at_the_padded_count(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[5, 9]]}, max_num_batched_tokens=12)
    assert slots(tables, [(0, list(range(8)))]) == [list(range(80, 88))]
    idx_mapping, query_start_loc, positions = batch_tensors(tables, [(0, [8, 9, 10])])
    padded = tables.compute_slot_mappings(idx_mapping, query_start_loc, positions, 8)
    assert padded.tolist() == [[88, 89, 90, -1, -1, -1, -1, -1]]
    assert tables.slot_mappings.tolist() == [[88, 89, 90] + [-1] * 9]


def test_overwrite_after_preemption_replaces_the_row(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[3, 5, 9]]})
    tables.append_block_ids(0, [[7]], overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(0, [5, 20])]) == [[117, -1]]


def test_overwrite_with_nothing_empties_the_row(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, PAGED], {0: [[3, 5], [4]]})
    tables.append_block_ids(0, [[], []], overwrite=True)
    tables.apply_staged_writes()
    assert tables.num_blocks.np[:, 0].tolist() == [0, 0]
    assert tables.num_blocks.gpu[:, 0].tolist() == [0, 0]
    assert slots(tables, [(0, [0])]) == [[-1], [-1]]
    assert gathered(tables, [0]) == [[[0] * 8], [[0] * 8]]


def test_overwrite_then_append_in_one_step(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[3, 5, 9]]})
    tables.append_block_ids(0, [[7]], overwrite=True)
    tables.append_block_ids(0, [[8]], overwrite=False)
    tables.apply_staged_writes()
    assert tables.num_blocks.np[0, 0] == 2
    assert gathered(tables, [0])[0][0][:4] == [7, 8, 0, 0]


def test_append_then_overwrite_in_one_step_keeps_only_the_overwrite(
    make_tables: MakeTables,
) -> None:
    tables = make_tables([PAGED], {0: [[3]]})
    tables.append_block_ids(0, [[5, 6, 9]], overwrite=False)
    tables.append_block_ids(1, [[4]], overwrite=True)
    tables.append_block_ids(0, [[7]], overwrite=True)
    tables.append_block_ids(0, [[2]], overwrite=False)
    tables.apply_staged_writes()
    assert [row[:4] for row in gathered(tables, [0, 1])[0]] == [[7, 2, 0, 0], [4, 0, 0, 0]]


def test_replayed_tokens_leave_shared_blocks_alone(make_tables: MakeTables) -> None:
    groups = [
        KVCacheGroup(block_size=4, max_num_blocks=4),
        KVCacheGroup(block_size=4, max_num_blocks=4, prefix_cacheable=False),
    ]
    tables = make_tables(groups, {0: [[3, 5, 9], [0, 6, 7]]}, replay_window=4)
    batch = [(0, [4, 5, 6, 7, 8, 9])]
    expected = [[-1, -1, -1, -1, 36, 37], [24, 25, 26, 27, 28, 29]]
    assert slots(tables, batch, replay_start=[4]) == expected
    assert slots(tables, batch, replay_start=[0])[0] == [20, 21, 22, 23, 36, 37]
    assert slots(tables, batch)[0] == [20, 21, 22, 23, 36, 37]
    assert faults(tables) == []


def test_each_step_sees_the_writes_staged_before_it(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED])
    idx_mapping, query_start_loc, positions = batch_tensors(tables, [(0, [0])])
    seen = []
    for block_id in (5, 9, 11, 13):
        tables.append_block_ids(0, [[block_id]], overwrite=True)
        block_tables, slot_mappings = tables.step(idx_mapping, query_start_loc, positions)
        seen.append((block_tables[0][0, 0].clone(), slot_mappings[0, 0].clone()))
        # Staged for the next step: what this step saw must not change.
        tables.append_block_ids(0, [[1000]], overwrite=True)
    assert [(int(block), int(slot)) for block, slot in seen] == [
        (5, 80),
        (9, 144),
        (11, 176),
        (13, 208),
    ]


def test_staging_never_changes_what_was_applied(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[5]]})
    tables.append_block_ids(0, [[9]], overwrite=True)
    tables.append_block_ids(1, [[4]], overwrite=True)
    assert tables.block_tables[0].gpu[:2, 0].tolist() == [5, 0]
    assert tables.num_blocks.gpu[0, :2].tolist() == [1, 0]
    assert tables.num_blocks.np[0, :2].tolist() == [1, 1]
    assert slots(tables, [(0, [0]), (1, [0])]) == [[80, -1]]


def test_slot_beyond_int32_is_exact_in_int64(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[134217728]]}, slot_dtype=torch.int64)
    assert slots(tables, [(0, [0, 15])]) == [[2147483648, 2147483663]]


def test_slot_beyond_int32_is_refused_at_append_in_int32(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], slot_dtype=torch.int32)
    tables.append_block_ids(0, [[134217727]], overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(0, [0, 15])]) == [[2147483632, 2147483647]]
    with pytest.raises(ValueError, match=r"134217727\]; got 134217728.*slot_dtype int32"):
        tables.append_block_ids(0, [[134217728]], overwrite=True)


def test_pool_beyond_int32_slots_is_refused_at_construction(make_tables: MakeTables) -> None:
    make_tables([PAGED], slot_dtype=torch.int32, num_blocks=134217728)
    with pytest.raises(ConfigurationError, match=r"at most 134217728 blocks.*got 134217729"):
        make_tables([PAGED], slot_dtype=torch.int32, num_blocks=134217729)
    make_tables([PAGED], slot_dtype=torch.int64, num_blocks=134217729)


def test_ids_beyond_float32_are_exact(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[16777216, 16777217, 16777219]]}, slot_dtype=torch.int64)
    assert slots(tables, [(0, [0, 16, 32])]) == [[268435456, 268435472, 268435504]]


def test_positions_beyond_float32_are_exact(make_tables: MakeTables) -> None:
    group = KVCacheGroup(block_size=16, max_num_blocks=2**20 + 8)
    tables = make_tables([group], max_num_reqs=1)
    tables.append_block_ids(0, [range(1, 2**20 + 9)], overwrite=True)
    tables.apply_staged_writes()
    positions = [2**24 - 1, 2**24, 2**24 + 1, 2**24 + 17]
    assert slots(tables, [(0, positions)]) == [[position + 16 for position in positions]]


@pytest.mark.parametrize(
    ("block_size", "kernel_block_size", "position", "expected"),
    [(32, 16, 20, 116), (640, 128, 300, 2220), (32, 16, 0, 96), (640, 128, 639, 2559)],
)
def test_kernel_splitting(
    make_tables: MakeTables,
    block_size: int,
    kernel_block_size: int,
    position: int,
    expected: int,
) -> None:
    group = KVCacheGroup(block_size, max_num_blocks=4, kernel_block_size=kernel_block_size)
    tables = make_tables([group], {0: [[3]]})
    assert slots(tables, [(0, [position])]) == [[expected]]
    n = block_size // kernel_block_size
    assert gathered(tables, [0])[0][0][: n + 1] == [*range(3 * n, 4 * n), 0]
    assert tables.num_blocks.np[0, 0] == n


def test_scattered_positions_of_one_request(make_tables: MakeTables) -> None:
    group = KVCacheGroup(block_size=16, max_num_blocks=320)
    ids = [(7 * column) % 1000 + 1 for column in range(313)]
    assert ids[312] == 185
    tables = make_tables([group], {0: [ids]})
    assert slots(tables, [(0, [0, 5000])]) == [[16, 185 * 16 + 8]]
    assert slots(tables, [(0, [5000, 0, 4999])]) == [[185 * 16 + 8, 16, 185 * 16 + 7]]


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 4096])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_token_counts_and_widths(make_tables: MakeTables, num_tokens: int, width: int) -> None:
    """Counts that change a naive kernel's specialisation; here only the values are looked at."""
    group = KVCacheGroup(block_size=128, max_num_blocks=width)
    ids = list(range(11, 11 + width))
    tables = make_tables([group], {0: [ids]}, max_num_batched_tokens=4096)
    held = width * 128
    expected = [11 * 128 + p if p < held else -1 for p in range(num_tokens)]
    assert slots(tables, [(0, list(range(num_tokens)))]) == [expected]
    missing = max(num_tokens - held, 0)
    assert faults(tables) == ([("COLUMN_OUT_OF_ROW", 0, missing)] if missing else [])


def test_every_batch_size_down_to_two(make_tables: MakeTables) -> None:
    rows = {row: [[row + 1]] for row in range(32)}
    tables = make_tables([PAGED], rows, max_num_reqs=32, max_num_batched_tokens=32)
    for num_reqs in range(32, 1, -1):
        batch = [(row, [3]) for row in range(num_reqs)]
        assert slots(tables, batch) == [[16 * row + 19 for row in range(num_reqs)]]
        first_columns = tables.gather_block_tables(int32(tables, list(range(num_reqs))), 32)[0]
        assert first_columns[:, 0].tolist() == [
            row + 1 if row < num_reqs else 0 for row in range(32)
        ]


@pytest.mark.parametrize("width", [16384, 16385, 131072])
def test_last_column_of_a_long_row(make_tables: MakeTables, width: int) -> None:
    group = KVCacheGroup(block_size=128, max_num_blocks=width)
    assert group.row_width == width
    tables = make_tables([group], {1: [range(5, width + 5)]}, max_num_reqs=2)
    last = width * 128 - 1
    assert slots(tables, [(1, [last, last + 1])]) == [[(width + 4) * 128 + 127, -1]]
    table = gathered(tables, [1, 0])[0]
    assert table[0][-1] == width + 4
    assert set(table[1]) == {0}


def test_groups_times_programs_beyond_a_grid_limit(make_tables: MakeTables) -> None:
    groups = [PAGED] * 8
    tables = make_tables(
        groups,
        {0: [[g + 1] for g in range(8)], 1: [[g + 100] for g in range(8)]},
        max_num_batched_tokens=8193,
    )
    batch = [(t % 2, [t % 16]) for t in range(8193)]
    got = slots(tables, batch)
    for g in range(8):
        assert got[g] == [16 * (g + (100 if t % 2 else 1)) + t % 16 for t in range(8193)]


def test_state_group_beside_a_paged_one(make_tables: MakeTables) -> None:
    tables = make_tables([STATE, PAGED, STATE], {0: [[9], [5], [8]]})
    assert slots(tables, [(0, [0, 3])]) == [[-1, -1], [80, 83], [-1, -1]]
    tables = make_tables([PAGED, STATE, PAGED], {0: [[9], [5], [8]]})
    assert slots(tables, [(0, [0, 3])]) == [[144, 147], [-1, -1], [128, 131]]
    assert faults(tables) == []
    assert [table[0][0] for table in gathered(tables, [0])] == [9, 5, 8]


def test_zero_requests(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, RING], {0: [[5], [7]]})
    assert slots(tables, [(0, [0])]) == [[80], [28]]
    assert slots(tables, []) == [[], []]
    assert tables.gather_block_tables(int32(tables, []), 2)[0].tolist() == [[0] * 8] * 2
    tables.append_block_ids(1, [[6], [8]], overwrite=True)
    block_tables, slot_mappings = tables.step(
        int32(tables, []), int32(tables, [0]), int64(tables, []), num_tokens_padded=0
    )
    assert block_tables[0].shape == (0, 8)
    assert slot_mappings.shape == (2, 0)
    assert tables.block_tables[0].gpu[1, 0] == 6


def test_zero_tokens_of_live_requests(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[5]]})
    assert slots(tables, [(0, []), (0, [])]) == [[]]
    assert faults(tables) == []


def test_empty_request_in_the_middle(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[5]], 1: [[6]], 2: [[7]]})
    batch = [(0, [0, 1]), (1, []), (2, [4, 5, 6])]
    assert batch_tensors(tables, batch)[1].tolist() == [0, 2, 2, 5]
    assert slots(tables, batch) == [[80, 81, 116, 117, 118]]


def test_dummy_requests_read_no_row(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, RING], {0: [[5], [7]], 3: [[9], [8]]})
    assert slots(tables, [(-1, [0, 1]), (0, [2]), (-1, [0])]) == [
        [-1, -1, 82, -1],
        [-1, -1, 30, -1],
    ]
    assert faults(tables) == []
    assert gathered(tables, [-1, 0, -1])[1] == [[0], [7], [0]]


def test_slots_are_padding_from_birth(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, RING, STATE])
    assert set(tables.slot_mappings.flatten().tolist()) == {-1}
    assert set(tables.map_tokens(int32(tables, []), int64(tables, [])).flatten().tolist()) == set()
    assert all(not table.any() for table in tables.input_block_tables)


def test_dummy_run_over_live_rows_writes_nowhere(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, STATE], {0: [[5], [3]], 1: [[6], [4]]})
    slots(tables, [(0, [0, 1]), (1, [2])])
    gathered(tables, [0, 1])
    sources = [table.gpu.clone() for table in tables.block_tables]
    slot_mappings = tables.get_dummy_slot_mappings(2)  # fewer tokens than the step before wrote
    block_tables = tables.get_dummy_block_tables(2)
    assert slot_mappings.tolist() == [[-1] * 2] * 2
    assert set(tables.slot_mappings.flatten().tolist()) == {-1}
    assert all(not table.any() for table in tables.input_block_tables)
    assert all(torch.equal(a.gpu, b) for a, b in zip(tables.block_tables, sources, strict=True))
    # The engine then writes into the dummy rows; the next batch must not show any of it.
    for table in block_tables:
        table.fill_(777)
    assert gathered(tables, [1]) == [[[6] + [0] * 7], [[4]]]
    assert all(not table[1:].any() for table in tables.input_block_tables)


def test_errors_come_before_the_launch_and_name_everything(make_tables: MakeTables) -> None:
    """513 blocks into a row of 512."""
    group = KVCacheGroup(block_size=16, max_num_blocks=512, name="attention")
    tables = make_tables([group])
    with pytest.raises(RowCapacityError) as raised:
        tables.append_block_ids(3, [range(513)], overwrite=False)
    assert str(raised.value) == (
        "new_block_ids of request row 3, group 0 (attention): expected at most 512 columns in the "
        "row; got 513 > 512 (0 filled, 513 new). Raise max_num_blocks of the group "
        "(max_num_blocks_per_group), or limit the request's length; nothing was staged for any "
        "group"
    )
    with pytest.raises(InvalidArgumentError, match=r"req_index.*\[0, 4\); got 4\. max_num_reqs"):
        tables.append_block_ids(4, [[1]], overwrite=False)


def test_row_beyond_the_table_is_padded_zeroed_and_counted(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED, RING], {3: [[5], [7]]})
    assert slots(tables, [(4, [0, 1]), (3, [1]), (2**31 - 1, [0])]) == [
        [-1, -1, 81, -1],
        [-1, -1, 29, -1],
    ]
    assert faults(tables) == [("ROW_OUT_OF_RANGE", 0, 3), ("ROW_OUT_OF_RANGE", 1, 3)]
    assert gathered(tables, [4, 3]) == [[[0] * 8, [5] + [0] * 7], [[0], [7]]]
    assert faults(tables) == [("ROW_OUT_OF_RANGE", 0, 1), ("ROW_OUT_OF_RANGE", 1, 1)]
    assert slots(tables, [(3, [1])]) == [[81], [29]]
    assert faults(tables) == []


def test_no_gathered_cell_shows_a_larger_earlier_batch(make_tables: MakeTables) -> None:
    tables = make_tables([PAGED], {0: [[1, 2, 3]], 1: [[4, 5]], 2: [[6]]})
    gathered(tables, [0, 1, 2])
    assert gathered(tables, [2]) == [[[6] + [0] * 7]]
    assert not tables.input_block_tables[0][1:].any()
    padded = tables.gather_block_tables(int32(tables, [1]), 3)[0]
    assert padded.tolist() == [[4, 5] + [0] * 6, [0] * 8, [0] * 8]


def test_columns_below_the_sliding_window_are_null(make_tables: MakeTables) -> None:
    window = KVCacheGroup(block_size=16, max_num_blocks=8, sliding_window_reach=20)
    tables = make_tables([window, PAGED], {2: [[1, 2, 3, 4], [1, 2, 3, 4]], 0: [[9], [9]]})
    computed = int32(tables, [0, 0, 52, 0])  # by row: (52 - 20) // 16 = 2 columns are dead
    tables_of_batch = gathered(tables, [0, 2], num_computed_tokens=computed)
    assert [row[:4] for row in tables_of_batch[0]] == [[9, 0, 0, 0], [0, 0, 3, 4]]
    assert [row[:4] for row in tables_of_batch[1]] == [[9, 0, 0, 0], [1, 2, 3, 4]]
    assert gathered(tables, [2])[0][0][:4] == [1, 2, 3, 4]  # and comes back without it
