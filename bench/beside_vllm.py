"""Our tables and vLLM 0.33's own v2 BlockTables with the same rows, measured one after the other.

Nothing is timed before both have given the same tables and slots. vLLM comes from an unpacked wheel
(VLLM_WHEEL, see peers.py). On the CPU, where its kernels do not run, a second manager of ours takes
its place: a dry run, whose times say nothing.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.cuda_timing import Timing, clock_time, device_time, host_time
from bench.peers import vllm_block_tables
from fused_slots import AscendBlockTables
from tests.workloads import StepTensors, Workload

STEPS = 330
"""Steps of a schedule, more than any measurement takes."""

VLLM = Path(os.environ.get("VLLM_WHEEL", "vllm-wheel"))
"""The unpacked wheel."""


def machine(device: str) -> dict[str, Any]:
    """What a result was measured on, and with what."""
    if device == "cpu":
        return {"card": f"dry run on {platform.machine()}", "torch": torch.__version__}
    return {
        "card": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "vllm": "0.33.0",
    }


def filled_tables(load: Workload, device: str = "cuda") -> AscendBlockTables:
    """A manager with the rows of a workload."""
    tables = load.make_tables(device)
    for row, ids, overwrite in load.appends:
        tables.append_block_ids(row, ids, overwrite=overwrite)
    tables.apply_staged_writes()
    return tables


def permuted(load: Workload, seed: int, device: str = "cuda") -> StepTensors:
    """The step with its requests in another order, among requests of one length."""
    arrays = load.tensors("cpu")
    lens = torch.from_numpy(load.query_start_loc).diff()
    ones = torch.nonzero(lens == lens.min()).flatten()
    order = torch.arange(len(lens))
    order[ones] = ones[torch.randperm(len(ones), generator=torch.Generator().manual_seed(seed))]
    starts = torch.from_numpy(load.query_start_loc)[:-1].long()
    tokens = torch.cat([torch.arange(int(lens[b])) + int(starts[b]) for b in order.tolist()])
    reordered = arrays._replace(
        idx_mapping=arrays.idx_mapping[order], positions=arrays.positions[tokens]
    )
    return StepTensors(*(tensor.to(device) for tensor in reordered))


class Side(ABC):
    """A manager with a workload's rows, ours or vLLM's."""

    tables: Any

    @abstractmethod
    def gather_and_slots(self, arrays: StepTensors, num_tokens: int) -> Any:
        """Gathered tables and slots of a batch, nothing being staged."""

    @abstractmethod
    def take_step(self, arrays: StepTensors, num_tokens: int) -> Any:
        """The same after applying what is staged."""

    def stage(self, load: Workload) -> None:
        for row, ids, overwrite in load.appends:
            self.tables.append_block_ids(row, ids, overwrite=overwrite)

    def slots(self, arrays: StepTensors, num_tokens: int) -> torch.Tensor:
        slots: torch.Tensor = self.tables.compute_slot_mappings(*arrays[:3], num_tokens)
        return slots


class Ours(Side):
    def __init__(self, load: Workload, device: str) -> None:
        self.tables = filled_tables(load, device)
        self.tables.warmup()

    def gather_and_slots(self, arrays: StepTensors, num_tokens: int) -> Any:
        return self.tables.step(*arrays[:3], num_tokens_padded=num_tokens)

    def take_step(self, arrays: StepTensors, num_tokens: int) -> Any:
        return self.gather_and_slots(arrays, num_tokens)


class Peer(Side):
    def __init__(self, load: Workload, device: str) -> None:
        self.tables = vllm_block_tables(VLLM)(**load.vllm_arguments(device))
        self.stage(load)
        self.tables.apply_staged_writes()

    def gather_and_slots(self, arrays: StepTensors, num_tokens: int) -> Any:
        tables = self.tables.gather_block_tables(arrays.idx_mapping, len(arrays.idx_mapping))
        return tables, self.slots(arrays, num_tokens)

    def take_step(self, arrays: StepTensors, num_tokens: int) -> Any:
        self.tables.apply_staged_writes()
        return self.gather_and_slots(arrays, num_tokens)


def check_equal(ours: Side, peer: Side, arrays: StepTensors, num_tokens: int) -> None:
    """Refuse to go on if the two differ in a table or a slot, the padded tail included."""
    our_tables, our_slots = ours.gather_and_slots(arrays, num_tokens)
    peer_tables, peer_slots = peer.gather_and_slots(arrays, num_tokens)
    if not torch.equal(our_slots, peer_slots):
        raise SystemExit("slots differ")
    if not torch.equal(ours.tables.slot_mappings, peer.tables.slot_mappings):
        raise SystemExit("padded tails differ")
    for g, (mine, theirs) in enumerate(zip(our_tables, peer_tables, strict=True)):
        filled = ours.tables.num_blocks.gpu[g, arrays.idx_mapping.long()]
        live = torch.arange(mine.shape[1], device=mine.device) < filled[:, None]
        if not torch.equal(mine[live], theirs[live]):
            raise SystemExit(f"gathered tables of group {g} differ")


class Comparison:
    """One workload on both sides, checked to be equal before anything is timed.

    Args:
        make_load: makes the workload; what it makes is alike every time.
        device: "cuda", or "cpu" for a dry run.
        labels: what `result` begins with.
    """

    def __init__(self, make_load: Callable[[], Workload], device: str, **labels: Any) -> None:
        self.make_load, self.device = make_load, device
        load = make_load()
        self.num_reqs, self.num_tokens = load.num_reqs, load.num_tokens
        self.ours = Ours(load, device)
        self.peer: Side = Ours(load, device) if device == "cpu" else Peer(load, device)
        self.sets = [permuted(load, seed, device) for seed in range(4)]
        for arrays in self.sets:
            check_equal(self.ours, self.peer, arrays, self.num_tokens)
        self.result: dict[str, Any] = dict(labels)

    def measure(self, what: str, measure: Callable[[Any], Timing]) -> None:
        mine, theirs = measure(self.ours), measure(self.peer)
        ratio = round(theirs.median / mine.median, 2)
        self.result[what] = {"ours": asdict(mine), "vllm": asdict(theirs), "ratio": ratio}

    def measure_device(self) -> None:
        """Slots; gather and slots of one batch again and again; and of another order each time."""
        self.measure("slots", lambda side: self._calls(side.slots, self.sets))
        self.measure("steady", lambda side: self._calls(side.gather_and_slots, self.sets[:1]))
        self.measure("whole", lambda side: self._calls(side.gather_and_slots, self.sets))

    def measure_host(self) -> None:
        """The host's time for a whole step with its appends."""
        self.measure("host", lambda side: self._host_time(self.moving_step(side)))

    def measure_host_slots(self) -> None:
        """The host's time for compute_slot_mappings."""
        arguments = (self.sets[0], self.num_tokens)
        self.measure("host slots", lambda side: self._host_time(partial(side.slots, *arguments)))

    def moving_step(self, side: Side) -> Callable[[], None]:
        """A function that takes a workload's next step, from rows set up anew."""
        load = self.make_load()
        side.stage(load)
        side.tables.apply_staged_writes()
        arrays = load.tensors(self.device)
        schedule = iter([list(load.next_step()) for _ in range(STEPS)])

        def step() -> None:
            for row, ids, overwrite in next(schedule):
                side.tables.append_block_ids(row, ids, overwrite=overwrite)
            side.take_step(arrays, self.num_tokens)

        return step

    def _calls(self, call: Callable[..., Any], inputs: list[StepTensors]) -> Timing:
        calls = [partial(call, arrays, self.num_tokens) for arrays in inputs]
        return clock_time(calls) if self.device == "cpu" else device_time(calls)

    def _host_time(self, call: Callable[[], object]) -> Timing:
        return clock_time([call]) if self.device == "cpu" else host_time(call)


def line(result: dict[str, Any]) -> str:
    """A result's medians, ours / vLLM's = ratio."""
    labels = [str(value) for value in result.values() if not isinstance(value, dict)]
    cells = [" ".join(labels)]
    for what, value in result.items():
        if isinstance(value, dict) and "ratio" in value:
            unit = "median" if "median" in value["ours"] else "device"
            mine, theirs = value["ours"][unit], value["vllm"][unit]
            cells.append(f"{what} {mine:.2f}/{theirs:.1f}={value['ratio']:.1f}x")
        elif isinstance(value, dict):
            cells.append(f"{what} {value['median']:.2f}")
    return " | ".join(cells)
