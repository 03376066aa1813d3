"""The package's kernels, compiled for Ascend and executed through the public API: exact."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from compile import ASCEND_910B3, ASCEND_950
from hivm import Modes
from hivm_backend import executed_on
from kernel_cases import CAPACITY, SETUPS, Batch, Setup, expected, fill_rows, random_batch
from step_model import StepModel

from fused_slots import AscendBlockTables

CASES = 200
STEPS = 60
TARGETS = [(name, ASCEND_910B3) for name in SETUPS] + [
    (name, ASCEND_950) for name in ("replay", "sharded_other_sizes")
]


def make(setup: Setup, target: str, modes: Modes = Modes()) -> AscendBlockTables:  # noqa: B008
    with executed_on(target, modes=modes):
        return setup.make()


def arguments(setup: Setup, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(batch.idx_mapping).to(setup.index_dtype),
        torch.from_numpy(batch.query_start_loc),
        torch.from_numpy(batch.positions),
    )


def expected_tokens(batch: Batch, rng: np.random.Generator) -> int:
    """What the caller says it expects: the truth, or more or less of it."""
    return int(rng.choice([len(batch.positions), int(rng.integers(0, CAPACITY + 1))]))


def replay_of(batch: Batch) -> torch.Tensor | None:
    return None if batch.replay_start is None else torch.from_numpy(batch.replay_start)


def faults_of(tables: AscendBlockTables) -> Counter[tuple[str, int]]:
    return Counter({(f.code.name, f.group): f.count for f in tables.take_faults()})


def check_slots(name: str, target: str, cases: int, modes: Modes = Modes()) -> None:  # noqa: B008
    setup, tables = SETUPS[name], make(SETUPS[name], target, modes)
    rng = np.random.default_rng(len(name))
    for case in range(cases):
        if case % 20 == 0:
            rows = fill_rows(tables, setup, rng)
        batch = random_batch(setup, rows, rng)
        tables.slot_mappings.fill_(-77)
        tables.compute_slot_mappings(
            *arguments(setup, batch), expected_tokens(batch, rng), replay_start=replay_of(batch)
        )
        slots, faults = expected(setup, batch)
        message = f"{name} on {target}, case {case}: {batch.kind}"
        np.testing.assert_array_equal(tables.slot_mappings.numpy(), slots, message)
        assert faults_of(tables) == faults, message


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_slots_equal_the_oracle(name: str, target: str) -> None:
    check_slots(name, target, CASES)


@pytest.mark.parametrize(
    "modes", [Modes(division_ulps=-1), Modes(division_ulps=1), Modes(flush_tail=False)], ids=str
)
@pytest.mark.parametrize("name", ["other_sizes", "sharded_other_sizes"])
def test_slots_do_not_depend_on_what_hardware_leaves_open(name: str, modes: Modes) -> None:
    check_slots(name, ASCEND_910B3, 20, modes)


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_drafts_equal_the_oracle(name: str, target: str) -> None:
    setup, tables = SETUPS[name], make(SETUPS[name], target)
    rng = np.random.default_rng(len(name))
    rows = fill_rows(tables, setup, rng)
    for case in range(40):
        batch = random_batch(setup, rows, rng)
        flat = np.repeat(batch.idx_mapping, np.diff(batch.query_start_loc))
        tokens = len(flat)
        drafts = Batch(
            batch.kind, rows, flat, np.arange(tokens + 1, dtype=np.int32), batch.positions, None
        )
        index, _, positions = arguments(setup, drafts)
        out = torch.full((len(setup.groups), CAPACITY), -77, dtype=torch.int64)
        tables.map_tokens(index, positions, out=out)
        slots, faults = expected(setup, drafts)
        np.testing.assert_array_equal(out.numpy(), slots, f"case {case}: {batch.kind}")
        assert faults_of(tables) == faults


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_whole_steps_equal_the_model(name: str, target: str) -> None:
    """Writes, gather, slots and padding in one launch, batch slots kept and exchanged."""
    setup, tables = SETUPS[name], make(SETUPS[name], target)
    rng = np.random.default_rng(len(name))
    model = StepModel(setup, tables, rng)
    for step in range(STEPS):
        model.change_rows()
        batch = model.batch()
        padded = int(rng.integers(len(batch.idx_mapping), setup.num_rows + 1))
        computed = model.computed_tokens()
        tables.slot_mappings.fill_(-77)
        launches = tables.launches
        gathered, _ = tables.step(
            *arguments(setup, batch),
            num_reqs_padded=padded,
            num_tokens_padded=expected_tokens(batch, rng),
            num_computed_tokens=None if computed is None else torch.from_numpy(computed),
            replay_start=replay_of(batch),
        )
        assert tables.launches == launches + 1
        slots, faults = expected(setup, batch)
        message = f"{name} on {target}, step {step}: {batch.kind}"
        np.testing.assert_array_equal(tables.slot_mappings.numpy(), slots, message)
        for g, table in enumerate(gathered):
            np.testing.assert_array_equal(
                table.numpy(), model.gathered(g, batch, padded, computed), f"{message}, group {g}"
            )
            assert not tables.input_block_tables[g][padded:].any(), message
        np.testing.assert_array_equal(tables.num_blocks.gpu.numpy(), tables.num_blocks.np)
        assert faults_of(tables) == faults + model.gather_faults(batch), message


def test_gather_into_other_tables() -> None:
    setup = SETUPS["powers"]
    tables = make(setup, ASCEND_910B3)
    rng = np.random.default_rng(0)
    model = StepModel(setup, tables, rng)
    for _ in range(10):
        model.change_rows()
        tables.apply_staged_writes()
        batch = model.batch()
        index, num_reqs = arguments(setup, batch)[0], len(batch.idx_mapping)
        out = [
            torch.full((num_reqs + 2, table.shape[1] + int(rng.integers(0, 40))), -77,
                       dtype=torch.int32)
            for table in tables.input_block_tables
        ]  # fmt: skip
        tables.gather_block_tables(index, num_reqs + 1, out=out)
        for g, table in enumerate(out):
            whole = model.gathered(g, batch, num_reqs + 1, None, table.shape[1])
            np.testing.assert_array_equal(table[: num_reqs + 1].numpy(), whole)
            assert (table[num_reqs + 1] == -77).all()
