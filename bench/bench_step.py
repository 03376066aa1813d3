"""The whole step: staged writes, gather, slots and padding; and beside one manager a group."""

from typing import Any

import pytest
import torch

from bench.prepared import Prepared, per_group_managers, ratio_beside
from tests.workloads import workload

STEPS = 200


def bench_step(prepared: Prepared, benchmark: Any) -> None:
    """A step with nothing staged."""
    idx_mapping, query_start_loc, positions, num_computed_tokens = prepared.tensors

    def step() -> Any:
        return prepared.tables.step(
            idx_mapping, query_start_loc, positions, num_computed_tokens=num_computed_tokens
        )

    tables, slots = step()
    prepared.check_tables(tables)
    prepared.check_slots(slots)
    benchmark(step)


def bench_whole_step(prepared: Prepared, benchmark: Any) -> None:
    """Appends and step of a steady workload that moves on."""
    tables = prepared.tables

    def following() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (prepared.next_step(), prepared.tensors), {}

    def whole_step(appends: Any, tensors: Any) -> Any:
        for row, block_ids, overwrite in appends:
            tables.append_block_ids(row, block_ids, overwrite)
        idx_mapping, query_start_loc, positions, num_computed_tokens = tensors
        return tables.step(
            idx_mapping, query_start_loc, positions, num_computed_tokens=num_computed_tokens
        )

    prepared.stage(prepared.next_step())
    gathered, slots = whole_step([], prepared.tensors)
    prepared.check_tables(gathered)
    prepared.check_slots(slots)
    benchmark.pedantic(whole_step, setup=following, rounds=STEPS)


@pytest.mark.parametrize("name", ["decode 256x6", "decode 64x12"])
def bench_step_beside_one_manager_a_group(name: str, benchmark: Any) -> None:
    prepared = Prepared(name)
    managers = per_group_managers(workload(name))
    idx_mapping, query_start_loc, positions, num_computed_tokens = prepared.tensors

    def step(tables: Any) -> Any:
        return tables.step(
            idx_mapping, query_start_loc, positions, num_computed_tokens=num_computed_tokens
        )

    def each() -> Any:
        return [step(manager) for manager in managers]

    prepared.check_slots(step(prepared.tables)[1])
    prepared.check_slots(torch.cat([slots for _, slots in each()]))
    benchmark.extra_info.update(ratio_beside(lambda: step(prepared.tables), each))
    benchmark(lambda: step(prepared.tables))
