"""Ours beside vLLM 0.33's own v2 BlockTables on one GPU: python -m bench.cuda_compare --json FILE.

Needs an importable vllm 0.33.0. Every comparison first checks that both give the same tables and
slots and refuses to report a ratio if they do not. What is measured, see cuda_timing.py:

- slots: compute_slot_mappings, four orders of the batch in turn;
- steady: gather + slots, the same batch again and again (ours in one `step`);
- whole: gather + slots, another order each time, so that every row is copied whole;
- host: the host's time for a whole step with its appends;
- profile: device time of such a step, its uploads included, and what was launched.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.cuda_timing import Timing, device_time, host_time, profiled
from bench.cuda_tune import filled_tables, permuted
from fused_slots import AscendBlockTables
from tests.workloads import MEASURED, StepTensors, Workload, workload

STEPS = 330
"""Steps of a schedule, more than any measurement takes."""

SWEPT = ("decode 256x6", "decode 64x12")
"""Workloads measured at several contexts."""


@triton.jit
def empty_kernel(pointer, size):
    """Nothing: what a launch of a grid costs."""


class Peer:
    """vLLM's tables with the rows of a workload."""

    def __init__(self, load: Workload) -> None:
        from vllm.v1.worker.gpu.block_table import BlockTables

        self.tables = BlockTables(**load.vllm_arguments("cuda"))
        self.stage(load)
        self.tables.apply_staged_writes()

    def stage(self, load: Workload) -> None:
        for row, ids, overwrite in load.appends:
            self.tables.append_block_ids(row, ids, overwrite=overwrite)

    def slots(self, arrays: StepTensors, num_tokens: int) -> torch.Tensor:
        return self.tables.compute_slot_mappings(*arrays[:3], num_tokens)

    def gather_and_slots(self, arrays: StepTensors, num_tokens: int) -> Any:
        tables = self.tables.gather_block_tables(arrays.idx_mapping, len(arrays.idx_mapping))
        return tables, self.slots(arrays, num_tokens)


class Ours:
    """Our tables with the rows of a workload."""

    def __init__(self, load: Workload) -> None:
        self.tables = filled_tables(load)
        self.tables.warmup()

    def stage(self, load: Workload) -> None:
        for row, ids, overwrite in load.appends:
            self.tables.append_block_ids(row, ids, overwrite=overwrite)

    def slots(self, arrays: StepTensors, num_tokens: int) -> torch.Tensor:
        return self.tables.compute_slot_mappings(*arrays[:3], num_tokens)

    def gather_and_slots(self, arrays: StepTensors, num_tokens: int) -> Any:
        return self.tables.step(*arrays[:3], num_tokens_padded=num_tokens)


def check_equal(ours: Ours, peer: Peer, arrays: StepTensors, num_tokens: int) -> None:
    """Refuse to go on if the two differ in a table or a slot, the padded tail included."""
    our_tables, our_slots = ours.gather_and_slots(arrays, num_tokens)
    peer_tables, peer_slots = peer.gather_and_slots(arrays, num_tokens)
    if not torch.equal(our_slots, peer_slots):
        raise SystemExit("slots differ")
    if not torch.equal(ours.tables.slot_mappings, peer.tables.slot_mappings):
        raise SystemExit("padded tails differ")
    for g, (mine, theirs) in enumerate(zip(our_tables, peer_tables, strict=True)):
        filled = ours.tables.num_blocks.gpu[g, arrays.idx_mapping.long()]
        live = torch.arange(mine.shape[1], device="cuda") < filled[:, None]
        if not torch.equal(mine[live], theirs[live]):
            raise SystemExit(f"gathered tables of group {g} differ")


def empty_grid(tables: AscendBlockTables, num_reqs: int, num_tokens: int) -> Timing:
    grid = tables.launch_plan(num_reqs, num_tokens).grid
    argument = torch.zeros(1, device="cuda")
    launch = partial(empty_kernel[grid], argument, 1, num_warps=8)
    return device_time([launch])


def next_step_of(load: Workload, side: Any, through: Callable[[StepTensors, int], Any]) -> Any:
    """A function that takes a workload's next step: appends, staged writes, tables, slots."""
    side.stage(load)
    side.tables.apply_staged_writes()
    arrays = load.tensors("cuda")
    num_tokens = load.num_tokens
    schedule = []
    for _ in range(STEPS):
        load.next_step()
        schedule.append(list(load.appends))
    place = 0

    def step() -> None:
        nonlocal place
        for row, ids, overwrite in schedule[place]:
            side.tables.append_block_ids(row, ids, overwrite=overwrite)
        place += 1
        through(arrays, num_tokens)

    return step


def peer_step(peer: Peer) -> Callable[[StepTensors, int], Any]:
    def through(arrays: StepTensors, num_tokens: int) -> Any:
        peer.tables.apply_staged_writes()
        return peer.gather_and_slots(arrays, num_tokens)

    return through


def compare(name: str, context: int | None, parts: str) -> dict[str, Any]:
    """All figures of one workload."""
    load = workload(name, context=context)
    num_tokens = load.num_tokens
    ours, peer = Ours(load), Peer(load)
    sets = [permuted(load, seed) for seed in range(4)]
    for arrays in sets:
        check_equal(ours, peer, arrays, num_tokens)
    result: dict[str, Any] = {"workload": name, "context": context}

    def both(what: str, measure: Callable[[Any], Timing]) -> None:
        mine, theirs = measure(ours), measure(peer)
        ratio = theirs.median / mine.median
        result[what] = {"ours": asdict(mine), "vllm": asdict(theirs), "ratio": round(ratio, 2)}

    def graph_of(side: Any, method: str, inputs: list[StepTensors]) -> Timing:
        call = getattr(side, method)
        return device_time([partial(call, arrays, num_tokens) for arrays in inputs])

    result["empty"] = asdict(empty_grid(ours.tables, load.num_reqs, num_tokens))
    both("slots", lambda side: graph_of(side, "slots", sets))
    both("steady", lambda side: graph_of(side, "gather_and_slots", sets[:1]))
    both("whole", lambda side: graph_of(side, "gather_and_slots", sets))
    if "host" in parts:

        def prepare(side: Any) -> Callable[[], object]:
            fresh = workload(name, context=context)
            through = peer_step(side) if side is peer else side.gather_and_slots
            return next_step_of(fresh, side, through)

        both("host", lambda side: host_time(prepare(side)))
        both("host slots", lambda side: host_time(partial(side.slots, sets[0], num_tokens)))
        profiles = [profiled(prepare(ours)), profiled(prepare(peer))]
        ratio = round(profiles[1].device / max(profiles[0].device, 1e-9), 2)
        mine, theirs = map(asdict, profiles)
        result["profile"] = {"ours": mine, "vllm": theirs, "ratio": ratio}
    return result


def line(result: dict[str, Any]) -> str:
    cells = [f"{result['workload']:22s} {result['context'] or '':>8}"]
    cells.append(f"empty {result['empty']['median']:.2f}")
    for what, value in result.items():
        if isinstance(value, dict) and "ratio" in value:
            unit = "median" if "median" in value["ours"] else "device"
            mine, theirs = value["ours"][unit], value["vllm"][unit]
            cells.append(f"{what} {mine:.2f}/{theirs:.1f}={value['ratio']:.1f}x")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="contexts from 8k to 1M as well")
    options = parser.parse_args()
    wanted: list[tuple[str, int | None, str]] = [(name, None, "host") for name in MEASURED]
    if options.sweep:
        contexts = (8192, 32768, 131072, 1048576)
        wanted += [(name, context, "device") for name in SWEPT for context in contexts]
    results = []
    for name, context, parts in wanted:
        results.append(compare(name, context, parts))
        print(line(results[-1]), flush=True)
    if options.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": "0.33.0"}
        card = {"card": torch.cuda.get_device_name(), "python": platform.python_version()}
        options.json.write_text(json.dumps({**card, **versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
