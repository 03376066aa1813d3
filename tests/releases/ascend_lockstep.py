"""Stock and fused v1 tables of the vllm-ascend on the path, in lockstep; prints JSON.

Run as a module, in an environment with the releases' Python files on its path:
`python -m tests.releases.ascend_lockstep STEPS FOLDER`; the calls made of our tables are written
into the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.update(
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    VLLM_TARGET_DEVICE="cpu",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_PLUGINS="",
    FUSED_SLOTS_VLLM="strict",
)

import numpy as np
import torch

from bench.recording.scenarios import Layers, Scenario
from tests.releases.ascend_batch import Batch, is_state, stand_ins
from tests.releases.ascend_calls import NotedTables

HYBRID = (Layers("full", 2), Layers("sliding", 2, window=40), Layers("mamba", 2))
COMMON: dict[str, Any] = {
    "description": "",
    "layers": HYBRID,
    "block_size": 16,
    "max_num_reqs": 6,
    "max_num_batched_tokens": 64,
    "prompt_tokens": (5, 120),
    "output_tokens": (10, 60),
    "arrivals_per_step": 0.5,
    "max_model_len": 256,
}


def scenarios(num_steps: int) -> list[tuple[Scenario, int]]:
    """What is run, with the tokens of a kernel's block."""
    common = COMMON | {"num_steps": num_steps}
    caching = {"prefix_caching": True, "shared_prefixes": (48, 80), "asynchronous": True}
    return [
        (Scenario(name="sync, few blocks", seed=41, num_blocks=50, **common), 16),
        (Scenario(name="async, caching, split", seed=42, num_blocks=55, **caching, **common), 8),
    ]


def run_scenario(
    scenario: Scenario, kernel_size: int, ours_class: type, stock_class: type, notes: Path
) -> Counter[str]:
    """All steps of a scenario; what was compared. The calls made of ours are written to `notes`."""
    from tests.releases.scheduling import Loop

    loop = Loop(scenario)
    sizes = [[0] if is_state(spec) else [kernel_size] for spec in loop.specs]
    stock = Batch(loop, stock_class, sizes)
    ours = Batch(loop, partial(NotedTables, ours_class), sizes)
    random, counts = Random(scenario.seed), Counter[str]()
    check_attributes(stock.tables, ours.tables)
    for scheduled in loop.run():
        for batch in (stock, ours):
            batch.update(scheduled.output)
        requests = stock.batch.req_ids
        assert requests == ours.batch.req_ids
        if not requests:
            continue
        if len(requests) > 1 and random.random() < 0.3:
            pair = random.sample(range(len(requests)), 2)
            for batch in (stock, ours):
                batch.batch.swap_states(*pair)
            requests = stock.batch.req_ids
        both = stock.tables, ours.tables
        compare_step(*both, loop, scheduled, list(requests), counts)
        if random.random() < 0.3:
            compare_drafts(*both, loop, scheduled, list(requests), random, counts)
    assert min(loop.counts["preempted"], loop.counts["resumed"]), loop.counts
    assert loop.counts["prefix hits"] or not scenario.prefix_caching, loop.counts
    ours.tables.write(notes)
    told = ("steps", "preempted", "resumed", "prefix hits")
    return counts + Counter({name: loop.counts[name] for name in told})


def compare_step(
    stock: Any, ours: Any, loop: Any, scheduled: Any, requests: list[str], counts: Counter[str]
) -> None:
    """Rows, lengths and slots of one step, with each other and with the KV cache manager."""
    num_reqs = len(requests)
    lengths = [scheduled.output.num_scheduled_tokens[request] for request in requests]
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    begins = [scheduled.num_computed[request] for request in requests]
    spans = [range(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    positions = torch.tensor([p for span in spans for p in span], dtype=torch.int64)
    for tables in (stock, ours):
        tables.commit_block_table(num_reqs)
        tables.compute_slot_mapping(num_reqs, starts, positions)
    capacity = loop.scenario.max_num_batched_tokens
    for g, spec in enumerate(loop.specs):
        theirs, mine = stock[g], ours[g]
        for row in range(num_reqs):
            filled = int(theirs.num_blocks_per_row[row])
            assert mine.num_blocks_per_row[row] == filled
            expected, found = (t.get_device_tensor()[row] for t in (theirs, mine))
            assert torch.equal(found[:filled], expected[:filled])
            assert not found[filled:].any()
            counts["rows"] += 1
        if is_state(spec):
            assert (mine.slot_mapping.gpu == -1).all()
            continue
        slots = mine.slot_mapping.gpu
        assert torch.equal(slots[:capacity], theirs.slot_mapping.gpu[:capacity])
        assert (slots[capacity:] == -1).all()
        held = [
            scheduled.held[request][g][position // spec.block_size] * spec.block_size
            + position % spec.block_size
            for request, span in zip(requests, spans, strict=True)
            for position in span
        ]
        assert slots[: len(held)].tolist() == held
        counts["slots"] += len(held)


def compare_drafts(
    stock: Any,
    ours: Any,
    loop: Any,
    scheduled: Any,
    requests: list[str],
    random: Random,
    counts: Counter[str],
) -> None:
    """A flat list of tokens, all behind the step's first ones, from host arrays."""
    rows = [random.randrange(len(requests)) for _ in range(random.randint(1, 9))]
    positions = []
    for row in rows:
        request = requests[row]
        end = scheduled.num_computed[request] + scheduled.output.num_scheduled_tokens[request]
        positions.append(random.randrange(end))
    flat = np.array(rows, np.int64), np.array(positions, np.int64)
    for tables in (stock, ours):
        tables.compute_slot_mapping_draft(*flat)
    for g, spec in enumerate(loop.specs):
        if is_state(spec):
            continue
        slots = ours[g].slot_mapping.gpu
        assert torch.equal(slots[: len(rows)], stock[g].slot_mapping.gpu[: len(rows)])
        counts["draft slots"] += len(rows)


def check_attributes(stock: Any, ours: Any) -> None:
    """What other modules of vllm-ascend read of a table is what it has of its own."""
    plain = (
        *("max_num_reqs", "max_num_blocks_per_req", "max_num_batched_tokens", "pin_memory"),
        *("device", "physical_block_size", "logical_block_size", "block_size", "is_mamba_group"),
        *("blocks_per_phys_block", "use_hybrid_blocks", "kernel_sizes", "dcp_world_size"),
        *("dcp_rank", "cp_kv_cache_interleave_size", "is_circular", "is_circular_group"),
    )
    assert len(stock.block_tables) == len(ours.block_tables)
    for theirs, mine in zip(stock.block_tables, ours.block_tables, strict=True):
        for name in plain:
            if hasattr(theirs, name):
                assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("block_table", "slot_mapping"):
            for part in ("np", "cpu", "gpu"):
                expected, found = (getattr(getattr(t, name), part) for t in (theirs, mine))
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype), (name, part)
        assert mine.num_blocks_per_row.shape == theirs.num_blocks_per_row.shape


def main() -> None:
    num_steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch_npu = stand_ins()
    from fused_slots.vllm import plugin

    plugin.register()
    assert plugin.status().active, plugin.status()
    assert not plugin.status().replaced, plugin.status()
    from vllm_ascend.worker import npu_input_batch

    ours: Any = npu_input_batch.MultiGroupBlockTable
    stock = ours.stock
    assert stock.__module__ == "vllm_ascend.worker.block_table"
    assert plugin.status().active, plugin.status()
    assert plugin.status().replaced, plugin.status()
    counts = {
        scenario.name: run_scenario(
            scenario, kernel_size, ours, stock, folder / f"{scenario.name}.json"
        )
        for scenario, kernel_size in scenarios(num_steps)
    }
    from tests.releases.ascend_lives import check_compressed_rows, run_lives

    if ours.rules.compressed_rows:
        check_compressed_rows(ours, stock)
    counts["random lives"] = run_lives(num_steps // 4, ours, stock)
    report = {"contract": plugin.status().contract, "counts": counts}
    print(json.dumps(report | {"torch_npu": sorted(set(torch_npu.asked_for))}))


if __name__ == "__main__":
    main()
