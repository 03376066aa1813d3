"""Parts that run our managers, and vllm-ascend's kernels beside them."""

from __future__ import annotations

import csv
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fused_slots
from bench.ascend_first_run.device import Device, batch, filled
from bench.ascend_first_run.note import Note, wrong_if
from bench.ascend_rows import FOUR, Row
from fused_slots import AscendBlockTables
from fused_slots.faults import ConfigurationError
from tests.configuration import Config, Target, make_manager
from tests.simulator import SimulationError, simulate

PACKAGES = ("torch", "torch-npu", "triton-ascend", "numpy", "vllm", "vllm-ascend")
LIVES, STEPS, REPLAYS, ROUNDS = 40, 40, 500, 20
RANDOM_SECONDS = 600


class _Unsuited(Exception):
    """A configuration that the backend refuses, or whose faults would need details."""


def machine(device: Device, note: Note) -> dict[str, Any]:
    """Versions, the device, its cores, and whether its kernels compile."""
    found: dict[str, Any] = {
        "device": device.name,
        "name": platform.processor() or platform.machine(),
        "versions": {"fused_slots": fused_slots.__version__, "python": platform.python_version()},
    }
    for package in PACKAGES:
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found["versions"][package] = "not installed"
    note(found)
    if device.is_npu:
        found["name"] = device.npu.get_device_name(device.torch)
        note(found)
    tables = filled(device, next(iter(device.rows.values())))
    found["cores"] = getattr(tables._backend, "num_cores", None)
    note(found)
    report = tables.warmup()
    return found | {"variants": list(report.variants), "warmup_s": round(report.seconds, 2)}


def lives(device: Device, note: Note) -> dict[str, Any]:
    """Simulated lives of small managers, every cell and slot against both oracles."""
    lives_to_run = device.few(LIVES)
    return _lives(device, note, 0, lambda done: done < lives_to_run)


def random(device: Device, note: Note) -> dict[str, Any]:
    """The same with other seeds, for ten minutes."""
    end = time.monotonic() + device.few(RANDOM_SECONDS)
    return _lives(device, note, 10**6, lambda done: time.monotonic() < end)


def _lives(
    device: Device, note: Note, first_seed: int, goes_on: Callable[[int], bool]
) -> dict[str, Any]:
    """A difference raises with the command that reproduces it."""

    def make(config: Config) -> AscendBlockTables:
        if config.checked:
            raise _Unsuited
        try:
            return make_manager(config, device.name)
        except ConfigurationError as error:
            if not error.argument.startswith("slot_dtype=torch.int64"):
                raise
            raise _Unsuited from error

    target = Target(device.name, make, str(device.torch))
    found = {"lives": 0, "steps": 0, "slots": 0, "next_seed": first_seed}
    while goes_on(found["lives"]):
        try:
            report = simulate(target, found["next_seed"], device.few(STEPS), "small")
        except SimulationError as error:
            if not isinstance(error.__cause__, _Unsuited):
                raise
        else:
            found["lives"] += 1
            found["steps"] += report.steps
            found["slots"] += report.tokens_owned
        found["next_seed"] += 1
        note(found)
    return found


def graphs(device: Device, note: Note) -> dict[str, Any]:
    """An ACL graph of slots, replayed with other contents; the CPU backend judges, then time."""
    row = Row([1] * 32 + [40], [0] * 33, FOUR)
    tables, judge = filled(device, row), filled(Device("cpu"), row)
    static, num_tokens = batch(device, row, 1), sum(row.lengths)
    tables.warmup()

    def call() -> None:
        tables.compute_slot_mappings(*static, num_tokens)

    call()
    replay = call
    if device.is_npu:
        graph = device.npu.NPUGraph()
        with device.npu.graph(graph):
            call()
        replay = graph.replay
    found: dict[str, Any] = {"captured": device.is_npu, "replays": 0, "wrong_replays": 0}
    for turn in range(device.few(REPLAYS)):
        fresh = batch(Device("cpu"), row, turn + 2)
        for tensor, content in zip(static, fresh, strict=True):
            tensor.copy_(content)
        replay()
        expected = judge.compute_slot_mappings(*fresh, num_tokens)
        got = tables.slot_mappings[:, :num_tokens].cpu().long()
        found["replays"] += 1
        found["wrong_replays"] += int(not torch.equal(got, expected.long()))
        note(found)
    wrong_if(found["wrong_replays"], found)
    return found | {"replay_us": device.microseconds(replay, 100, ROUNDS)}


def kernels(device: Device, note: Note) -> dict[str, Any]:
    """Microseconds of our slots and steps, by events around many launches."""
    found: dict[str, dict[str, float]] = {}
    for name, row in device.rows.items():
        found[name] = {
            f"{form}_us": device.microseconds(call, 50, ROUNDS)
            for form, call in calls(device, row).items()
        }
        note(found)
    return found


def calls(device: Device, row: Row) -> dict[str, Callable[[], object]]:
    """Our launches of a row."""
    tables, given, num_tokens = filled(device, row), batch(device, row, 0), sum(row.lengths)
    return {
        "slots": partial(tables.compute_slot_mappings, *given, num_tokens),
        "steady_step": partial(tables.step, *given, num_tokens_padded=num_tokens),
    }


def public(device: Device, note: Note) -> dict[str, Any]:
    """vllm-ascend's slots of the same batches, if it is installed: equal to ours, and time."""
    assert device.npu
    try:
        release = import_module("vllm_ascend.ops.triton.compute_slot_mapping")
    except ImportError as error:
        return {"not_installed": str(error)}
    found: dict[str, Any] = {}
    for name, row in device.rows.items():
        if row.ranks > 1:
            continue
        ours = calls(device, row)["slots"]()
        assert isinstance(ours, torch.Tensor)
        call, outs = public_call(release, device, row)
        call()
        same = all(torch.equal(o[: len(m)], m) for o, m in zip(outs, ours.int(), strict=True))
        found[name] = {"slots_us": device.microseconds(call, 50, ROUNDS), "equal": same}
        note(found)
    return wrong_if(not all(each["equal"] for each in found.values()), found)


def public_call(
    release: Any, device: Device, row: Row
) -> tuple[Callable[[], object], list[torch.Tensor]]:
    """A launch of vllm-ascend 0.30's, and what it writes."""
    tables, given = filled(device, row), batch(device, row, 0)
    gathered = tables.gather_block_tables(given[0], len(row.lengths))
    outs = [device.zeros(row.capacity) for _ in row.sizes]
    addresses = [
        torch.tensor([t.data_ptr() for t in of], dtype=torch.int64).to(device.torch)
        for of in (gathered, outs)
    ]
    widths = torch.tensor([table.stride(0) for table in gathered]).to(device.torch)
    sizes = torch.tensor(row.sizes, dtype=torch.int32).to(device.torch)
    call = partial(
        release.compute_slot_mapping_fused_groups,
        len(outs), len(row.lengths), sum(row.lengths), row.capacity, given[1], given[2],
        *addresses, widths, sizes, min(row.sizes), pad_id=-1,
        is_circular_ptr=device.zeros(len(outs)),
    )  # fmt: skip
    return lambda: (call(), tables), outs  # addresses keep nothing alive


def profiler(device: Device, note: Note) -> dict[str, Any]:
    """Microseconds of each kernel on the device, by torch_npu's profiler."""
    assert device.npu
    profiling = import_module("torch_npu").profiler
    found: dict[str, Any] = {}
    for name, row in device.rows.items():
        launches = calls(device, row).values()
        for call in launches:
            call()
        with tempfile.TemporaryDirectory() as folder:
            handler = profiling.tensorboard_trace_handler(folder)
            with profiling.profile(on_trace_ready=handler):
                for call in [*launches] * device.few(20):
                    call()
                device.synchronize()
            found[name] = durations(Path(folder))
        note(found)
    return found


def durations(folder: Path) -> dict[str, float]:
    """Median microseconds of each kernel in the profiler's `kernel_details.csv`."""
    times = defaultdict(list)
    for path in folder.rglob("kernel_details.csv"):
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                if "on_ascend" in line["Name"]:
                    times[line["Name"]].append(float(line["Duration(us)"]))
    return {name: round(median(each), 3) for name, each in times.items()}
