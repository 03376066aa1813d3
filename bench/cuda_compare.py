"""Ours beside vLLM 0.33's own v2 BlockTables on one GPU: python -m bench.cuda_compare --json FILE.

Needs an unpacked wheel of vllm 0.33.0 (VLLM_WHEEL, see peers.py). Each comparison first checks that
both give the same tables and slots and refuses to report a ratio if they do not. What is measured,
see cuda_timing.py:

- slots: compute_slot_mappings, four orders of the batch in turn;
- steady: gather + slots, the same batch again and again (ours in one `step`);
- whole: gather + slots, another order each time, so that every row is copied whole;
- host: the host's time for a whole step with its appends;
- profile: device time of such a step, its uploads included, and what was launched.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench.cuda_timing import Timing, device_time, host_time, profiled
from bench.cuda_tune import filled_tables, permuted
from bench.peers import vllm_block_tables
from fused_slots import AscendBlockTables
from tests.workloads import MEASURED, StepTensors, Workload, workload

STEPS = 330
"""Steps of a schedule, more than any measurement takes."""

VLLM = Path(os.environ.get("VLLM_WHEEL", "vllm-wheel"))
"""The unpacked wheel."""

SWEPT = ("decode 256x6", "decode 64x12")
"""Workloads measured at several contexts."""

CONTEXTS = (8192, 32768, 131072, 1048576)


@triton.jit
def empty_kernel(pointer, size):
    """Nothing: what a launch of a grid costs."""


class Peer:
    """vLLM's tables with the rows of a workload."""

    def __init__(self, load: Workload) -> None:
        self.tables = vllm_block_tables(VLLM)(**load.vllm_arguments("cuda"))
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


class Comparison:
    """One workload on both sides, checked to be equal before anything is timed."""

    def __init__(self, name: str, context: int | None) -> None:
        self.name, self.context = name, context
        load = workload(name, context=context)
        self.num_reqs, self.num_tokens = load.num_reqs, load.num_tokens
        self.ours, self.peer = Ours(load), Peer(load)
        self.sets = [permuted(load, seed) for seed in range(4)]
        for arrays in self.sets:
            check_equal(self.ours, self.peer, arrays, self.num_tokens)
        self.result: dict[str, Any] = {"workload": name, "context": context}

    def measure(self, what: str, measure: Callable[[Any], Timing]) -> None:
        mine, theirs = measure(self.ours), measure(self.peer)
        ratio = round(theirs.median / mine.median, 2)
        self.result[what] = {"ours": asdict(mine), "vllm": asdict(theirs), "ratio": ratio}

    def graph(self, side: Any, method: str, inputs: list[StepTensors]) -> Timing:
        call = getattr(side, method)
        return device_time([partial(call, arrays, self.num_tokens) for arrays in inputs])

    def whole_step(self, side: Any) -> Callable[[], object]:
        """A step with its appends, from rows set up anew."""
        through = side.gather_and_slots if side is self.ours else peer_step(side)
        return next_step_of(workload(self.name, context=self.context), side, through)

    def device(self) -> None:
        empty = empty_grid(self.ours.tables, self.num_reqs, self.num_tokens)
        self.result["empty"] = asdict(empty)
        self.measure("slots", lambda side: self.graph(side, "slots", self.sets))
        self.measure("steady", lambda side: self.graph(side, "gather_and_slots", self.sets[:1]))
        self.measure("whole", lambda side: self.graph(side, "gather_and_slots", self.sets))

    def host(self) -> None:
        self.measure("host", lambda side: host_time(self.whole_step(side)))
        slots = {id(side): partial(side.slots, self.sets[0], self.num_tokens) for side in self}
        self.measure("host slots", lambda side: host_time(slots[id(side)]))

    def profile(self) -> None:
        mine, theirs = (profiled(self.whole_step(side)) for side in self)
        ratio = round(theirs.device / max(mine.device, 1e-9), 2)
        self.result["profile"] = {"ours": asdict(mine), "vllm": asdict(theirs), "ratio": ratio}

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ours, self.peer))


def line(result: dict[str, Any]) -> str:
    cells = [f"{result['workload']:22s} {result['context'] or '':>8}"]
    if "empty" in result:
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
    parser.add_argument(
        "--parts", nargs="+", default=["device", "host"], choices=("device", "host", "profile")
    )
    parser.add_argument("--sweep", action="store_true", help="contexts from 8k to 1M as well")
    options = parser.parse_args()
    results = []
    contexts: list[tuple[str, int | None]] = [(name, None) for name in MEASURED]
    if options.sweep:
        contexts = [(name, context) for name in SWEPT for context in CONTEXTS]
    for name, context in contexts:
        comparison = Comparison(name, context)
        # The profiler slows every later launch of its process, so it comes in one of its own.
        for part in options.parts:
            getattr(comparison, part)()
        results.append(comparison.result)
        print(line(comparison.result), flush=True)
    if options.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": "0.33.0"}
        card = {"card": torch.cuda.get_device_name(), "python": platform.python_version()}
        options.json.write_text(json.dumps({**card, **versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
