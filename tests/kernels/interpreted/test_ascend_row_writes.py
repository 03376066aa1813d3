"""Tests of row operations, null blocks and replay lengths, on the interpreted Ascend kernels."""

from __future__ import annotations

import pytest

from tests import test_row_writes
from tests.backends_under_test import faults, slots
from tests.kernels.ascend_forms import MakeAscendTables

NEEDS_DETAILS = "test_the_null_block_is_not_written_and_counted"  # of faults, which Ascend lacks
globals().update(
    {
        name: test
        for name, test in vars(test_row_writes).items()
        if name.startswith("test_") and name != NEEDS_DETAILS
    }
)


def test_the_null_block_is_counted() -> None:
    groups = [test_row_writes.PAGED, test_row_writes.SPLIT, test_row_writes.RING]
    rows = {0: [[0, 7], [0, 1], [0]], 1: [[3], [7], [6]]}
    tables = MakeAscendTables()(groups, rows, null_block_id=0)
    batch = [(0, [3, 16, 40]), (1, [0])]
    assert slots(tables, batch) == [[-1, 112, -1, 48], [-1, -1, 40, 224], [-1, -1, -1, 24]]
    expected = [("COLUMN_OUT_OF_ROW", 0, 1), ("NULL_BLOCK", 0, 1)]
    expected += [("NULL_BLOCK", 1, 2), ("NULL_BLOCK", 2, 3)]
    assert sorted(faults(tables)) == sorted(expected)


@pytest.fixture(name="make_tables")
def _make_tables() -> MakeAscendTables:
    return MakeAscendTables()
