"""Incremental gathering of rows of many chunks; right is what a full copy gives."""

from __future__ import annotations

import pytest

from fused_slots import KVCacheGroup
from tests.backends_under_test import BACKENDS, MakeTables
from tests.kernels.full_copy import PAGED, SLIDING, FullCopy


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    backend: MakeTables = request.param
    return backend


@pytest.fixture(params=["one call", "three calls"])
def one_call(request: pytest.FixtureRequest) -> bool:
    return request.param == "one call"


LONG = KVCacheGroup(4, 3000, sliding_window_reach=10)
"""Rows of three chunks."""


def test_rows_of_several_chunks(make_tables: MakeTables, one_call: bool) -> None:
    life = FullCopy(make_tables, (PAGED, LONG), one_call, num_rows=3)
    life.start(0, [2, 1023])
    life.start(1, [2, 2500])
    life.run([0, 1], computed=0)
    for added in (1, 1, 200, 900):  # over the first edge of a chunk by one, to the second by far
        life.append(0, [0, added])
        life.run([0, 1], computed=4 * 1024)
    life.run([1, 0])
    life.run([1, 0], computed=4 * 2048 + 10)
    life.start(1, [0, 1024])
    life.run([1, 0], computed=0)
    life.dummy(2)
    life.run([0])
    life.gather_out([1, 0, 2], computed=4 * 1100)


def test_the_longest_rows(make_tables: MakeTables) -> None:
    """131,072 columns, the last of them in the table, in the packet and below the window."""
    group = KVCacheGroup(128, 131_072, sliding_window_reach=128)
    life = FullCopy(make_tables, (group, SLIDING), True, num_rows=2)
    life.start(0, [131_071, 2])
    life.run([0])
    life.append(0, [1, 0])
    life.run([0], computed=128 * 131_072)
    life.start(0, [5, 1])
    life.run([0])
