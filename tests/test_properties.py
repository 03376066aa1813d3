"""Shapes: no tokens, ragged batches, sixteen groups, a million tokens; the shared workloads."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_slots import (
    BlockTableError,
    ContextParallel,
    KVCacheGroup,
    reference,
)
from tests.backends_under_test import BACKENDS, MakeTables, batch_tensors, faults, gathered, slots
from tests.checker import Checker
from tests.configuration import FEATURES, Config, Target, make_manager
from tests.driver import Driver
from tests.model import Batch
from tests.workloads import MEASURED, SMALL, Workload, every_kind, workload


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    made: MakeTables = request.param
    return made


def test_a_row_of_131072_columns_is_exact_to_its_last_column(make_tables: MakeTables) -> None:
    width = 131_072
    tables = make_tables([KVCacheGroup(8, width)], max_num_reqs=2)
    tables.append_block_ids(1, (range(5, 5 + width),), overwrite=True)
    tables.apply_staged_writes()
    last = 8 * width - 1
    assert slots(tables, [(1, [0, last - 8, last, last + 1])]) == [
        [40, (width + 3) * 8 + 7, (width + 4) * 8 + 7, -1]
    ]
    assert gathered(tables, [1])[0][0] == list(range(5, 5 + width))
    with pytest.raises(BlockTableError, match=f"{width + 1} > {width}"):
        tables.append_block_ids(1, ([9],), overwrite=False)


@pytest.mark.parametrize("num_groups", range(1, 17))
def test_any_number_of_groups(make_tables: MakeTables, num_groups: int) -> None:
    groups = [KVCacheGroup(2 + g, 5) for g in range(num_groups)]
    tables = make_tables(groups, {2: [[g + 1] for g in range(num_groups)]})
    expected = [[(g + 1) * (2 + g), (g + 1) * (2 + g) + 1] for g in range(num_groups)]
    assert slots(tables, [(2, [0, 1])]) == expected
    assert [table[0][:2] for table in gathered(tables, [2])] == [
        [g + 1, 0] for g in range(num_groups)
    ]


def test_no_tokens_and_no_requests(make_tables: MakeTables) -> None:
    tables = make_tables([KVCacheGroup(4, 4), KVCacheGroup(8, 2)], {0: ([3], [4])})
    slots(tables, [(0, [0, 1, 2])])
    assert slots(tables, []) == [[], []]
    assert (tables.slot_mappings == -1).all()
    gathered(tables, [0, 0])
    assert gathered(tables, []) == [[], []]
    assert not any(table.any() for table in tables.input_block_tables)
    slots(tables, [(0, [0, 1, 2])])
    assert slots(tables, [(0, []), (1, []), (-1, [])]) == [[], []]
    tables.apply_staged_writes()
    step_tables, step_slots = tables.step(*batch_tensors(tables, []), num_reqs_padded=3)
    assert not any(table.any() for table in step_tables)
    assert (step_slots == -1).all()
    assert faults(tables) == []


def test_a_batch_that_fills_the_capacity_and_one_less(make_tables: MakeTables) -> None:
    tables = make_tables([KVCacheGroup(4, 8)], {0: (list(range(1, 9)),)})
    for count in (16, 15, 1, 16):
        assert slots(tables, [(0, range(count))]) == [[4 + t for t in range(count)]]


def test_positions_need_not_be_contiguous(make_tables: MakeTables) -> None:
    tables = make_tables([KVCacheGroup(16, 320)], {0: (list(range(1, 321)),)})
    positions = [0, 5000, 17, 5119, 4999, 16, 0]
    expected = [(p // 16 + 1) * 16 + p % 16 for p in positions]
    assert slots(tables, [(0, positions)]) == [expected]


@given(st.data())
def test_ragged_batches_agree_with_the_reference(data: st.DataObject) -> None:
    """Queries of any lengths over sixteen groups of every kind."""
    groups = every_kind(200)
    lens = data.draw(st.lists(st.integers(0, 17), max_size=8))
    config = config_of(groups, max_num_reqs=8, capacity=160)
    driver = driver_of(config, data.draw(st.integers(0, 2**32)))
    for row in range(8):
        ids = [[row * 300 + i + 1 for i in range(min(4, group.max_num_blocks))] for group in groups]
        driver.check.append(row, ids, True)
    starts = np.cumsum([0, *lens]).tolist()
    positions = data.draw(st.lists(st.integers(-1, 220), min_size=starts[-1], max_size=starts[-1]))
    rows = data.draw(st.lists(st.integers(-1, 8), min_size=len(lens), max_size=len(lens)))
    replay = data.draw(st.lists(st.integers(0, 40), min_size=len(lens), max_size=len(lens)))
    computed = data.draw(st.lists(st.integers(0, 400), min_size=8, max_size=8))
    driver.run(Batch(rows, starts, positions, replay, computed), clean=False)
    driver.finish()


@pytest.mark.parametrize("name", SMALL)
def test_workloads_agree_with_the_reference_step_after_step(name: str) -> None:
    load = workload(name)
    in_contract = FEATURES - {"faults"}
    driver = driver_of(config_of(load.groups, load=load), seed=1, features=in_contract)
    for _ in range(60):
        for row, ids, overwrite in load.appends:
            driver.check.append(row, ids, overwrite)
        batch = Batch(
            load.idx_mapping.tolist(),
            load.query_start_loc.tolist(),
            load.positions.tolist(),
            None,
            load.num_computed_tokens.tolist(),
        )
        driver.run(batch, clean=True)
        driver.manager.check_integrity()
        load.next_step()
    assert driver.manager.take_faults() == []
    driver.finish()


@pytest.mark.parametrize("name", MEASURED)
def test_measured_workloads_map_every_token(name: str) -> None:
    load = workload(name)
    tables = load.make_tables("cpu")
    for _ in range(3):
        for row, ids, overwrite in load.appends:
            tables.append_block_ids(row, ids, overwrite=overwrite)
        arrays = load.tensors("cpu")
        _, mapped = tables.step(
            arrays.idx_mapping,
            arrays.query_start_loc,
            arrays.positions,
            num_computed_tokens=arrays.num_computed_tokens,
        )
        assert (mapped[:, : load.num_tokens] > 0).all()
        assert (mapped[:, load.num_tokens :] == -1).all()
        tables.check_integrity()
        load.next_step()
    assert tables.take_faults() == []


def test_a_context_of_a_million_tokens() -> None:
    """The scalar reference judges the last tokens of requests of a million tokens."""
    load = workload("many groups", context=1_000_000)
    tables = load.make_tables("cpu")
    for row, ids, overwrite in load.appends:
        tables.append_block_ids(row, ids, overwrite=overwrite)
    arrays = load.tensors("cpu")
    gathered_tables, mapped = tables.step(
        arrays.idx_mapping,
        arrays.query_start_loc,
        arrays.positions,
        num_computed_tokens=arrays.num_computed_tokens,
    )
    assert load.positions.max() > 999_000
    rows = [
        {
            row: table.gpu[row, : tables.num_blocks.np[g, row]].numpy()
            for row in load.idx_mapping.tolist()
        }
        for g, table in enumerate(tables.block_tables)
    ]
    assert mapped.tolist() == reference.slot_mappings(
        load.groups,
        rows,
        load.idx_mapping.tolist(),
        load.query_start_loc.tolist(),
        load.positions.tolist(),
        load.max_num_batched_tokens,
    )
    for g, group in enumerate(load.groups):
        for b, row in enumerate(load.idx_mapping.tolist()[:2]):
            expected = reference.gathered_row(
                group, rows[g][row], tables.layout.widths[g], int(load.num_computed_tokens[row])
            )
            assert gathered_tables[g][b].tolist() == expected
    assert tables.take_faults() == []


def config_of(
    groups: tuple[KVCacheGroup, ...],
    max_num_reqs: int = 4,
    capacity: int = 32,
    load: Workload | None = None,
) -> Config:
    """A configuration for `Driver` with these groups, or with a workload's sizes."""
    return Config(
        groups=groups,
        max_num_reqs=load.max_num_reqs if load else max_num_reqs,
        capacity=load.max_num_batched_tokens if load else capacity,
        context_parallel=load.context_parallel if load else ContextParallel(),
        replay_window=5,
        slot_dtype=torch.int64,
        first_ids=(1,) * len(groups),
        pool_sizes=(100_000,) * len(groups),
        num_blocks_known=False,
        checked=False,
        aligned_rows=True,
        max_model_len=200,
    )


def driver_of(config: Config, seed: int, features: frozenset[str] = FEATURES) -> Driver:
    target = Target("cpu", make_manager, features=features)
    return Driver(target, config, Checker(target, config, make_manager(config)), Random(seed))
