"""The release's real scheduler and v2 runner over our tables, its own tables in lockstep.

Every call that the runner makes goes to both. Rows and slots must be equal but for what
docs/vllm.md lists, and be the blocks that the KV cache manager holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import model_runner

from bench.recording.scenarios import Layers, Scenario
from fused_slots import PAD_SLOT_ID, kernel_block_ids
from fused_slots.vllm.config import SPEC_KINDS
from fused_slots.vllm.releases.vllm import STATE
from tests.releases.scheduling import Loop, Scheduled
from tests.releases.v2_runner import BareRunner, patch_release
from tests.vllm.twin import TwinTables

COMMON: dict[str, Any] = {
    "description": "",
    "num_steps": 210,
    "layers": (Layers("full", 2), Layers("sliding", 2, window=40), Layers("mamba", 2)),
    "block_size": 8,
    "max_num_reqs": 6,
    "max_num_batched_tokens": 64,
    "prompt_tokens": (5, 120),
    "output_tokens": (10, 60),
    "arrivals_per_step": 0.5,
    "max_model_len": 256,
}
SCENARIOS = (
    Scenario(name="synchronous", seed=11, num_blocks=60, **COMMON),
    Scenario(
        name="asynchronous, prefix caching",
        seed=12,
        num_blocks=95,
        prefix_caching=True,
        shared_prefixes=(48, 80),
        asynchronous=True,
        **COMMON,
    ),
)


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_rows_and_slots_are_the_releases_own_and_the_managers(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_release()
    monkeypatch.setattr(model_runner, "BlockTables", TwinTables)
    loop = Loop(scenario)
    truth = Truth(loop)
    runner = BareRunner(loop, truth.kernel_block_sizes)
    tables = runner.block_tables
    assert type(tables) is TwinTables
    assert truth.splits == (tables.kernel_block_sizes != tables.block_sizes)
    launches = 0
    for scheduled in loop.run():
        prepared = runner.run(scheduled.output)
        assert (prepared is not None) == bool(scheduled.held)
        if prepared is not None:
            assert tables.launches == launches + 1
            truth.check(scheduled, *prepared, tables.slot_mappings)
        launches = tables.launches
    assert loop.counts["steps"] == scenario.num_steps
    happened = {"preempted", "resumed", "chunks", "finished"}
    happened |= {"prefix hits"} if scenario.prefix_caching else set()
    assert all(loop.counts[name] for name in happened), loop.counts
    assert truth.num_slots > 1000
    assert tables.compared["slots"] >= truth.num_slots
    assert tables.check_integrity() is None
    print(f"\n{scenario.name}: {truth.num_slots} slots, {tables.compared}, {loop.counts}")


class Truth:
    """The manager's blocks as rows and slots; tables that split blocks get halves."""

    def __init__(self, loop: Loop) -> None:
        self._states = [SPEC_KINDS[type(spec).__name__] == STATE for spec in loop.specs]
        self._block_sizes = [spec.block_size for spec in loop.specs]
        parameters = model_runner.BlockTables.stock.__init__.__code__.co_varnames
        self.splits = "kernel_block_sizes" in parameters
        self.kernel_block_sizes = [
            size // (2 if self.splits and not state else 1)
            for size, state in zip(self._block_sizes, self._states, strict=True)
        ]
        self.num_slots = 0

    def check(self, scheduled: Scheduled, batch: Any, gathered: Any, slots: Any) -> None:
        assert sorted(batch.req_ids) == sorted(scheduled.held)
        start = 0
        for b, request in enumerate(batch.req_ids):
            end = start + scheduled.output.num_scheduled_tokens[request]
            first = scheduled.num_computed[request]
            positions = torch.arange(first, first + end - start)
            assert torch.equal(batch.positions[start:end], positions)
            for g, held in enumerate(scheduled.held[request]):
                self._check_row(g, held, gathered[g][b], first)
                self._check_slots(g, held, positions, slots[g, start:end])
            start = end
        assert start == batch.num_tokens
        assert (slots[:, start:] == PAD_SLOT_ID).all()

    def _check_row(self, g: int, held: list[int], row: Any, first: int) -> None:
        """The manager's blocks, where it has not freed them; nothing beyond."""
        n = self._block_sizes[g] // self.kernel_block_sizes[g]
        columns = torch.from_numpy(kernel_block_ids(held, n))
        here = torch.tensor(held).repeat_interleave(n) != 0
        here &= torch.arange(len(here)) >= (0 if self._states[g] else (first - 39) // 4)
        assert torch.equal(row[: len(columns)][here], columns[here].int())
        assert not row[len(columns) :].any()

    def _check_slots(self, g: int, held: list[int], positions: Any, slots: Any) -> None:
        """Each token in the block held for it; a freed Mamba state has no opinion."""
        size = self._block_sizes[g]
        for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
            block = held[position // size] if position // size < len(held) else 0
            if block == 0:
                assert self._states[g]
                continue
            assert slot == block * size + position % size
            self.num_slots += 1
