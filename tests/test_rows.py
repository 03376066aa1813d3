"""Host-side rows and staged writes, against a plain dictionary of lists, on each half."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.faults import BlockIdError, BlockTableError, RowCapacityError
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from tests.host_halves import HALVES, staged_by

GROUPS = (
    KVCacheGroup(128, 6),
    KVCacheGroup(256, 3, kernel_block_size=128),
    KVCacheGroup(384, 2, kernel_block_size=128),
)
WIDTHS = (6, 6, 6)
MAX_NUM_REQS = 3


LAYOUT = TableLayout(
    groups=GROUPS,
    widths=WIDTHS,
    max_num_reqs=MAX_NUM_REQS,
    max_num_batched_tokens=4,
    context_parallel=ContextParallel(),
    replay_window=0,
    slot_dtype=torch.int64,
    num_blocks=(50, None, 20),
)


@pytest.fixture(params=HALVES, autouse=True, scope="module")
def _half(request: pytest.FixtureRequest) -> Iterator[None]:
    with staged_by(request.param):
        yield


def host_rows() -> HostRows:
    return HostRows(LAYOUT)


class Device:
    """A table arena to which staged writes are applied, as any backend would."""

    def __init__(self, rows: HostRows) -> None:
        self.rows = rows
        self.layout = LAYOUT
        self.arena = np.zeros(self.layout.arena_size, dtype=np.int32)
        self.num_columns = np.zeros((len(GROUPS), MAX_NUM_REQS), dtype=np.int32)

    def apply(self) -> None:
        writes = self.rows.collect()
        self.rows.clear()
        destinations = writes.destinations(self.layout)
        assert len(np.unique(destinations)) == len(destinations)
        assert len(np.unique(writes.rows)) == len(writes.rows)
        self.arena[destinations] = writes.column_ids
        self.num_columns[:, writes.rows] = writes.filled.T

    def row(self, g: int, row: int) -> list[int]:
        begin = self.layout.offsets[g] + row * WIDTHS[g]
        return self.arena[begin : begin + self.num_columns[g, row]].tolist()


def columns(g: int, block_ids: Sequence[int]) -> list[int]:
    n = GROUPS[g].columns_per_block
    return [block_id * n + part for block_id in block_ids for part in range(n)]


calls = st.lists(
    st.one_of(
        st.none(),  # apply
        st.tuples(
            st.integers(0, MAX_NUM_REQS - 1),
            st.tuples(*(st.lists(st.integers(0, 19), max_size=3) for _ in GROUPS)),
            st.booleans(),
        ),
    ),
    max_size=30,
)


@given(calls)
def test_any_order_of_appends_overwrites_and_applies(
    sequence: list[tuple[int, tuple[list[int], ...], bool] | None],
) -> None:
    rows = host_rows()
    device = Device(rows)
    truth = [[list[int]() for _ in range(MAX_NUM_REQS)] for _ in GROUPS]
    for call in [*sequence, None]:
        if call is None:
            device.apply()
            assert not rows.pending
            for g in range(len(GROUPS)):
                for row in range(MAX_NUM_REQS):
                    assert device.row(g, row) == truth[g][row]
            continue
        row, ids, overwrite = call
        kept = [[] if overwrite else truth[g][row] for g in range(len(GROUPS))]
        new = [columns(g, ids[g]) for g in range(len(GROUPS))]
        fits = all(len(kept[g]) + len(new[g]) <= WIDTHS[g] for g in range(len(GROUPS)))
        if fits:
            rows.stage(row, ids, overwrite)
            for g in range(len(GROUPS)):
                truth[g][row] = kept[g] + new[g]
        else:
            with pytest.raises(RowCapacityError):
                rows.stage(row, ids, overwrite)
        lengths = [[len(row_ids) for row_ids in group_rows] for group_rows in truth]
        assert rows.num_columns.tolist() == lengths


bad_ids = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=20),
    st.floats(),
    st.text(max_size=1),
    st.none(),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=2),
)


@given(
    st.integers(0, 2),
    st.lists(st.integers(0, 19), max_size=1),
    bad_ids,
    st.sampled_from([list, tuple]),
    st.booleans(),
)
def test_any_bad_id_is_refused_whole(
    g: int, good: list[int], bad: object, container: type, overwrite: bool
) -> None:
    rows = host_rows()
    rows.stage(0, [[1], [1], [1]], True)
    is_in_range = isinstance(bad, int) and not isinstance(bad, bool)
    limit = LAYOUT.max_block_ids[g]
    if is_in_range and isinstance(bad, int) and 0 <= bad <= limit:
        return
    before = (rows.num_columns.tolist(), rows.collect().column_ids.tolist(), rows.largest_ids)
    ids: list[object] = [[2], [2], [2]]
    ids[g] = container([*good, bad])
    with pytest.raises(BlockIdError) as raised:
        rows.stage(0, ids, overwrite)  # type: ignore[arg-type]
    assert f"group {g}, entry {len(good)}" in raised.value.argument
    after = (rows.num_columns.tolist(), rows.collect().column_ids.tolist(), rows.largest_ids)
    assert before == after


def test_writes_stay_pending_until_cleared() -> None:
    rows = host_rows()
    assert not rows.pending
    rows.stage(1, [[4], [], []], False)
    assert rows.pending
    assert rows.staged_rows == {1}
    first, second = rows.collect(), rows.collect()
    assert first.column_ids.tolist() == second.column_ids.tolist() == [4]
    rows.clear()
    assert not rows.pending
    assert rows.staged_rows == frozenset()
    assert rows.num_columns[0, 1] == 1  # the truth about filled columns stays


def test_collected_writes_are_not_changed_by_later_ones() -> None:
    rows = host_rows()
    rows.stage(1, [[4], [5], [6]], False)
    writes = rows.collect()
    kept = {name: values.copy() for name, values in vars(writes).items()}
    rows.clear()
    rows.stage(1, [[7], [8], [9]], True)
    rows.stage(2, [[7], [8], [9]], True)
    rows.collect()
    for name, values in vars(writes).items():
        assert np.array_equal(values, kept[name]), name


def test_nothing_staged_is_an_empty_record() -> None:
    writes = host_rows().collect()
    assert len(writes.rows) == 0
    assert len(writes.column_ids) == 0
    assert writes.destinations(LAYOUT).tolist() == []


def test_only_appends_of_something_and_overwrites_are_pending() -> None:
    rows = host_rows()
    rows.stage(0, [[], [], []], False)
    assert not rows.pending
    rows.stage(0, [[], [], []], True)
    assert rows.pending


def test_largest_ids_follow_what_was_staged_and_not_what_was_refused() -> None:
    rows = host_rows()
    rows.stage(0, [[7, 3], [2], []], True)
    assert rows.largest_ids == [7, 2, 0]
    with pytest.raises(BlockTableError):
        rows.stage(0, [[9], [9], [20]], True)
    assert rows.largest_ids == [7, 2, 0]


def test_ids_are_copied_when_they_are_staged() -> None:
    rows = host_rows()
    ids = [[4], array("i", [5]), np.array([6])]
    rows.stage(0, ids, True)
    ids[0][0], ids[1][0], ids[2][0] = 9, 9, 9
    assert rows.collect().column_ids.tolist() == [4, 10, 11, 18, 19, 20]


def test_a_row_is_full_at_exactly_its_width() -> None:
    rows = host_rows()
    rows.stage(0, [range(6), range(3), range(2)], False)
    assert rows.num_columns[:, 0].tolist() == [6, 6, 6]
    for g in range(3):
        ids = [[1] if other == g else [] for other in range(3)]
        with pytest.raises(RowCapacityError, match=rf"group {g}.* > 6 \(6 filled"):
            rows.stage(0, ids, False)
    rows.stage(0, [range(6), range(3), range(2)], True)
