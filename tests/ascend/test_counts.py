"""Work of the busiest of 40 cores, counted in executed code, against its budget and the goal.

`counts.json` holds the budgets, written by `--write-budgets -n 0`. The public figures are those
of the adaptive kernel that is public today, counted in the same executor (docs/evidence/ascend.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hivm_backend import executed_on

from fused_slots import AscendBlockTables, KVCacheGroup, reference

COUNTS = Path(__file__).with_name("counts.json")
GROUPS = [KVCacheGroup(size, 8192 // size) for size in (16, 32, 64, 128)]
FIGURES = ("scalar_ops", "vector_calls", "gm_scalar_loads", "dma_transfers", "dma_bytes")


class Workload(NamedTuple):
    """Query lengths, first positions, and scalar operations of the public kernel's worst core."""

    lengths: list[int]
    first: list[int]
    public: int


def _contexts(count: int) -> list[int]:
    return [8000 - 100 * (i % 13) for i in range(count)]


WORKLOADS = {
    "decode 256": Workload([1] * 256, _contexts(256), 5252),
    "MTP 64 x 4": Workload([4] * 64, _contexts(64), 1414),
    "prefill 4096": Workload([4096], [0], 8275),
    "63 decodes + 2048": Workload([1] * 63 + [2048], [*_contexts(63), 4000], 20022),
}


def filled(num_reqs: int, capacity: int) -> AscendBlockTables:
    with executed_on("Ascend910B3"):
        tables = AscendBlockTables.from_groups(
            GROUPS, max_num_reqs=max(num_reqs, 256), max_num_batched_tokens=capacity
        )
    for row in range(num_reqs):
        blocks = [list(range(row, row + 8192 // group.block_size)) for group in GROUPS]
        tables.append_block_ids(row, blocks, overwrite=True)
    tables.apply_staged_writes()
    return tables


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_busiest_core_stays_within_its_budget(
    name: str, request: pytest.FixtureRequest
) -> None:
    load = WORKLOADS[name]
    num_reqs, num_tokens = len(load.lengths), sum(load.lengths)
    tables = filled(num_reqs, max(num_tokens, 256))
    rows = list(reversed(range(num_reqs)))
    starts = [0, *np.cumsum(load.lengths).tolist()]
    positions = [p for f, n in zip(load.first, load.lengths, strict=True) for p in range(f, f + n)]
    batch = (
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(positions),
    )
    ids = [[list(range(r, r + 8192 // g.block_size)) for r in range(num_reqs)] for g in GROUPS]
    expected = reference.slot_mappings(GROUPS, ids, rows, starts, positions, num_tokens)
    counts = {}
    for form in ("slots", "whole step", "steady step"):
        tables.slot_mappings.fill_(-77)
        if form == "slots":
            tables.compute_slot_mappings(*batch, num_tokens)
        else:
            tables.step(*batch, num_tokens_padded=num_tokens)
        assert tables.slot_mappings[:, :num_tokens].tolist() == expected
        worst = tables._backend.launcher.executions[-1][1].worst_core(40)
        counts[form] = {figure: getattr(worst, figure) for figure in FIGURES}
    recorded = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if request.config.getoption("--write-budgets"):
        recorded[name] = counts
        COUNTS.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        return
    moved = {
        f"{form} {figure}": f"{recorded[name][form][figure]} -> {value}"
        for form, figures in counts.items()
        for figure, value in figures.items()
        if value != recorded[name][form][figure]
    }
    assert moved == {}, "make record-counts-ascend, if it is meant"
    assert counts["slots"]["scalar_ops"] * 5 <= load.public


def test_work_does_not_grow_with_the_context_of_steady_batch_slots() -> None:
    """A second gather of the same batch copies nothing, however long the rows."""
    recorded = json.loads(COUNTS.read_text())["decode 256"]
    assert recorded["steady step"]["dma_bytes"] * 10 < recorded["whole step"]["dma_bytes"]
