"""The first run on an Ascend NPU, in one command; send the result file back.

    python bench/ascend_first_run.py                 # on npu:0, writes ascend_first_run.json
    python bench/ascend_first_run.py --dry-run       # the same on the CPU, to try the script

1. correctness: simulated lives of small managers, every cell and slot against both oracles;
2. graphs: captured slot mappings replayed with other contents, against the CPU backend;
3. timings: one launch for all groups beside one manager a group, slots and whole steps.

A part that fails is written down with its error and does not stop the others; the exit status is
then 1. Needs the source tree, since the oracles are among the tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import fused_slots  # noqa: E402
from fused_slots import AscendBlockTables, KVCacheGroup  # noqa: E402
from fused_slots.faults import ConfigurationError  # noqa: E402
from tests.configuration import Config, Target, make_manager  # noqa: E402
from tests.simulator import SimulationError, simulate  # noqa: E402

CONTEXT = 8192
GROUPS = tuple(KVCacheGroup(size, CONTEXT // size) for size in (16, 32, 64, 128))
WORKLOADS: dict[str, list[int]] = {
    "decode 256": [1] * 256,
    "speculative 64 x 4": [4] * 64,
    "prefill 4096": [4096],
    "63 decodes + 2048": [1] * 63 + [2048],
}
"""Query lengths of each batch."""

PACKAGES = ("torch", "torch-npu", "triton-ascend", "numpy", "vllm", "vllm-ascend")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Unsuited(Exception):
    """A configuration that the backend refuses, or whose faults would need details."""


def main(arguments: list[str] | None = None) -> int:
    """Run all parts and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="npu:0")
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU")
    parser.add_argument("--lives", type=int, default=50, help="simulated lives of 40 steps")
    parser.add_argument("--replays", type=int, default=1000, help="graph replays")
    parser.add_argument("--rounds", type=int, default=200, help="timed calls of each kind")
    parser.add_argument("--json", type=Path, default=Path("ascend_first_run.json"))
    options = parser.parse_args(arguments)
    device = "cpu" if options.dry_run else options.device
    result: dict[str, Any] = {"machine": _attempt(lambda: describe_machine(device))}
    result["correctness"] = _attempt(lambda: check_lives(device, options.lives))
    result["graphs"] = _attempt(lambda: check_graphs(device, options.replays))
    result["timings"] = {
        name: _attempt(lambda lengths=lengths: time_workload(device, lengths, options.rounds))
        for name, lengths in WORKLOADS.items()
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(f"written to {options.json}")
    return int('"error"' in json.dumps(result))


def describe_machine(device: str) -> dict[str, Any]:
    """Versions, the device, and how long its kernels took to compile."""
    versions = {"fused_slots": fused_slots.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    tables = _tables(device, GROUPS, 256, 4096)
    report = tables.warmup()
    name = platform.processor() or platform.machine()
    if device != "cpu":
        name = torch.npu.get_device_name(tables.device)  # type: ignore[attr-defined]
    return {
        "device": device,
        "name": name,
        "cores": getattr(tables._backend, "num_cores", None),
        "versions": versions,
        "variants": list(report.variants),
        "warmup_seconds": round(report.seconds, 2),
    }


def check_lives(device: str, lives: int) -> dict[str, Any]:
    """Simulate lives; a difference names the seed that reproduces it."""

    def make(config: Config) -> AscendBlockTables:
        if config.checked:
            raise _Unsuited
        try:
            return make_manager(config, device)
        except ConfigurationError as error:
            if not error.argument.startswith("slot_dtype=torch.int64"):
                raise
            raise _Unsuited from error

    target = Target(device, make, device)
    steps = done = seed = tokens = 0
    while done < lives:
        try:
            report = simulate(target, seed, 40, "small")
            done, steps, tokens = done + 1, steps + report.steps, tokens + report.tokens_owned
        except SimulationError as error:
            if not isinstance(error.__cause__, _Unsuited):
                raise
        seed += 1
    return {"lives": done, "steps": steps, "slots": tokens, "mismatches": 0}


def check_graphs(device: str, replays: int) -> dict[str, Any]:
    """Replay a captured call with other contents of the same sizes; the CPU backend judges."""
    lengths = [1] * 32 + [40]
    tables, judge = (_filled(d, GROUPS, lengths) for d in (device, "cpu"))
    static = _batch(device, lengths, 0)
    num_tokens = sum(lengths)
    tables.warmup()

    def call() -> None:
        tables.compute_slot_mappings(*static, num_tokens)

    call()
    replay, captured = call, False
    if device != "cpu":
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            call()
        replay, captured = graph.replay, True
    for turn in range(replays):
        fresh = _batch("cpu", lengths, turn)
        for tensor, content in zip(static, fresh, strict=True):
            tensor.copy_(content)
        replay()
        expected = judge.compute_slot_mappings(*fresh, num_tokens)
        if not torch.equal(tables.slot_mappings[:, :num_tokens].cpu().long(), expected.long()):
            raise AssertionError(f"replay {turn} differs from the CPU backend")
    return {"replays": replays, "captured": captured, "mismatches": 0}


def time_workload(device: str, lengths: list[int], rounds: int) -> dict[str, float]:
    """Median microseconds of slots and steps: all groups at once, and one manager a group."""
    together = [_filled(device, GROUPS, lengths)]
    apart = [_filled(device, (group,), lengths) for group in GROUPS]
    batch, num_tokens = _batch(device, lengths, 1), sum(lengths)
    for managers in (together, apart):
        for tables in managers:
            tables.warmup()

    def slots(managers: list[AscendBlockTables]) -> Callable[[], None]:
        return lambda: [t.compute_slot_mappings(*batch, num_tokens) for t in managers] and None

    def steps(managers: list[AscendBlockTables]) -> Callable[[], None]:
        return lambda: [t.step(*batch, num_tokens_padded=num_tokens) for t in managers] and None

    return {
        "slots_us": _median_us(device, slots(together), rounds),
        "slots_per_group_us": _median_us(device, slots(apart), rounds),
        "step_us": _median_us(device, steps(together), rounds),
        "step_per_group_us": _median_us(device, steps(apart), rounds),
    }


def _median_us(device: str, call: Callable[[], None], rounds: int) -> float:
    """Median time of a call: between two events on a device, by the clock on the CPU."""
    times = []
    for _ in range(rounds + 3):
        if device == "cpu":
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
            continue
        npu = torch.npu  # type: ignore[attr-defined]
        first, last = (npu.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    return round(median(times[3:]), 2)


def _tables(
    device: str, groups: tuple[KVCacheGroup, ...], num_reqs: int, capacity: int
) -> AscendBlockTables:
    return AscendBlockTables.from_groups(
        groups, max_num_reqs=num_reqs, max_num_batched_tokens=capacity, device=device
    )


def _filled(device: str, groups: tuple[KVCacheGroup, ...], lengths: list[int]) -> AscendBlockTables:
    """A manager whose rows, one a request, hold a whole context of blocks of their own."""
    tables = _tables(device, groups, len(lengths), max(sum(lengths), 64))
    for row in range(len(lengths)):
        blocks = [CONTEXT // group.block_size for group in groups]
        tables.append_block_ids(
            row, [list(range(1 + row * n, 1 + row * n + n)) for n in blocks], overwrite=True
        )
    tables.apply_staged_writes()
    return tables


def _batch(device: str, lengths: list[int], turn: int) -> Tensors:
    """A batch of these lengths: rows in another order and other positions each turn."""
    random = torch.Generator().manual_seed(turn)
    lens = torch.tensor(lengths)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(lens, 0)
    rows = torch.randperm(len(lengths), generator=random).to(torch.int32)
    first = torch.randint(0, CONTEXT - max(lengths) + 1, (len(lengths),), generator=random)
    within = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1].long(), lens)
    positions = torch.repeat_interleave(first, lens) + within
    return rows.to(device), starts.to(device), positions.to(device)


def _attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part's result, or its error."""
    try:
        return part()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    sys.exit(main())
