"""A long life of one manager after another, every step checked, nothing growing.

    python -m bench.soak --device cpu --steps 1000000 --processes 2 --json FILE
    python -m bench.soak --device cuda --steps 1000000 --processes 8 --minutes 8 --json FILE

Each process keeps a manager of every world (soak_life.py) alive and gives them steps in turns, in
chunks of 1,000. Whatever a step writes (slots with their padded tail, gathered tables with all
their rows, drafts, dummies, the caller's own tables) is compared on the device with an oracle of
plain torch operations (soak_oracle.py); the counters of differences and the manager's faults are
read after each chunk. Memory, objects, compiled kernels and synchronisations are recorded there as
well, and the run fails if one of them has grown since the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.soak_life import WORLDS, Chunk, Life, Step, World
from bench.soak_oracle import PAD, Oracle
from fused_slots import AscendBlockTables, env
from fused_slots.faults import FaultCode
from tests.memory import kept_by, resident_kib

CHUNK = 1000
KEPT_RECORDS = 40
SENTINEL = 7_777_777
"""In the caller's tables before a call, and what a dummy run writes into the tables it is given."""

SYNCHRONISED = "called a synchronizing"
"""In torch's warning about an operation that waits for the GPU."""

GROWTH_ALLOWED = {
    "rss_kib": 16 * 1024,
    "objects": 200,
    "torch_kib": 1024,
    "compiled": 0,
    "kept": 200,
}
"""By how much the most of each record after the first tenth may exceed the most in it."""


class Mismatch(AssertionError):
    """A chunk of steps showed something else than the oracle."""


class Soaked:
    """One world's manager beside its oracle.

    Args:
        world: the configuration.
        seed: of its life.
        device: "cpu" or "cuda".
    """

    def __init__(self, world: World, seed: int, device: str) -> None:
        self.world, self.life = world, Life(world, seed)
        self.tables = AscendBlockTables.from_groups(
            world.groups,
            max_num_reqs=world.num_rows,
            max_num_batched_tokens=world.capacity,
            device=device,
            context_parallel=world.context_parallel,
            replay_window=world.replay_window,
        )
        self.tables.warmup()
        self.device = self.tables.device
        self.oracle = Oracle(world, self.device)
        self.out = [torch.empty_like(table) for table in self.tables.input_block_tables]
        shape = (len(world.groups), world.capacity)
        self.draft_out = torch.empty(shape, dtype=torch.int32, device=self.device)
        self.steps = self.compared = 0
        self.faults: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def run(self, num_steps: int) -> int:
        """Take a chunk of steps, check it, and return torch's synchronisations on the way.

        Raises:
            Mismatch: something differed; the message says where to look.
        """
        chunk = self.life.plan(num_steps)
        uploaded = {
            kind: torch.from_numpy(array).to(self.device) for kind, array in chunk.arrays.items()
        }
        cells = torch.tensor(chunk.cells, dtype=torch.int64).to(self.device)
        values = torch.tensor(chunk.values, dtype=torch.int32).to(self.device)
        counting = counted_synchronisations() if self.device.type == "cuda" else nullcontext([])
        with counting as synchronisations:
            written = 0
            for place, step in enumerate(chunk.steps):
                self.oracle.write(
                    cells[written : step.end_of_writes], values[written : step.end_of_writes]
                )
                written = step.end_of_writes
                self.take(step, Arrays(chunk, uploaded, place))
        self.kinds.update(step.kind for step in chunk.steps)
        self.steps += num_steps
        self.check(chunk)
        return sum(SYNCHRONISED in str(warning.message) for warning in synchronisations)

    def take(self, step: Step, arrays: Arrays) -> None:
        """One step through the manager and the oracle."""
        tables, oracle, world = self.tables, self.oracle, self.world
        for row, ids, overwrite in step.appends:
            tables.append_block_ids(row, ids, overwrite)
        if step.kind == "dummy":
            self.take_dummy(step)
            return
        lengths = arrays.int32["lengths"].view(-1, len(world.groups))
        idx = (arrays.int64 if step.wide_index else arrays.int32)["idx"][: step.num_reqs]
        tokens = (idx, arrays.int32["starts"], arrays.int64["positions"])
        computed = arrays.int32["computed"] if step.with_computed else None
        replay = arrays.int32["replay"] if step.with_replay else None
        padded = step.num_reqs_padded
        cells = oracle.gathered(arrays.int64["entry_rows"], arrays.int64["entry_computed"], lengths)
        if step.kind == "step":
            tables.step(
                *tokens,
                num_reqs_padded=padded,
                num_tokens_padded=step.num_tokens_padded,
                num_computed_tokens=computed,
                replay_start=replay,
            )
        else:
            out = self.fresh_out() if step.kind == "out" else None
            tables.apply_staged_writes()
            tables.gather_block_tables(idx, padded, out, num_computed_tokens=computed)
            tables.compute_slot_mappings(*tokens, step.num_tokens_padded, replay_start=replay)
            if out is not None:
                whole = torch.cat(out, dim=1)
                oracle.compare_cells(whole[:padded], cells[:padded])
                oracle.compare_cells(whole[padded:], SENTINEL)
        if step.kind != "out":
            oracle.compare_cells(torch.cat(tables.input_block_tables, dim=1), cells)
        slots = oracle.slots(
            arrays.int64["token_rows"],
            arrays.int64["token_positions"],
            arrays.bool["wanted"],
            arrays.bool["not_replayed"],
            lengths,
        )
        oracle.compare_slots(tables.slot_mappings, slots)
        self.compared += cells.numel() + slots.numel()
        if step.num_drafts:
            self.take_drafts(step, arrays, lengths)

    def take_drafts(self, step: Step, arrays: Arrays, lengths: torch.Tensor) -> None:
        tables, oracle, count = self.tables, self.oracle, step.num_drafts
        expected = oracle.slots(
            arrays.int64["token_drafts"],
            arrays.int64["token_draft_positions"],
            arrays.bool["wanted_drafts"],
            arrays.bool["wanted_drafts"],
            lengths,
        )
        out = self.draft_out if step.wide_index else None
        rows, positions = arrays.int64["draft_rows"], arrays.int64["draft_positions"]
        slots = tables.map_tokens(rows[:count], positions[:count], out)
        oracle.compare_slots(slots, expected[:, :count])
        self.compared += slots.numel()
        if out is not None:
            oracle.compare_slots(out[:, count:], PAD)

    def take_dummy(self, step: Step) -> None:
        """A dummy run: zeros and padding; its model writes into what it was given."""
        given = self.tables.get_dummy_block_tables(step.num_reqs_padded)
        slots = self.tables.get_dummy_slot_mappings(step.num_tokens_padded)
        for table in self.tables.input_block_tables:
            self.oracle.compare_cells(table, 0)
        self.oracle.compare_slots(self.tables.slot_mappings, PAD)
        self.compared += self.tables.slot_mappings.numel() + slots.numel()
        if step.wide_index:
            for table in given:
                table.fill_(SENTINEL)

    def fresh_out(self) -> list[torch.Tensor]:
        """The caller's tables, filled with what no table holds."""
        for table in self.out:
            table.fill_(SENTINEL)
        return self.out

    def check(self, chunk: Chunk) -> None:
        """Read the counters: nothing differed, and every fault is one that the oracle counted."""
        self.tables.apply_staged_writes()
        oracle, groups = self.oracle, self.world.groups
        expected = {
            (FaultCode.EMPTY_RING if groups[g].circular else FaultCode.COLUMN_OUT_OF_ROW, g): count
            for g, count in enumerate(oracle.faults.tolist())
            if count
        }
        for g, group in enumerate(groups):
            if chunk.unknown_rows and group.maps_slots:
                expected[FaultCode.ROW_OUT_OF_RANGE, g] = chunk.unknown_rows
        oracle.faults.zero_()
        counted = {(fault.code, fault.group): fault.count for fault in self.tables.take_faults()}
        wrong = {"slots": int(oracle.wrong_slots), "table cells": int(oracle.wrong_cells)}
        if any(wrong.values()) or counted != expected:
            where = f"{self.world.name}, steps {self.steps - chunk.num_steps} to {self.steps}"
            raise Mismatch(f"{where}: wrong {wrong}, faults {counted}, expected {expected}")
        for (code, _), count in counted.items():
            self.faults[code.name.lower()] += count


class Arrays:
    """One step's device arrays by dtype and name."""

    def __init__(self, chunk: Chunk, uploaded: dict[str, torch.Tensor], place: int) -> None:
        def parts(kind: str) -> dict[str, torch.Tensor]:
            sizes = chunk.fields.sizes[kind]
            return dict(zip(sizes, uploaded[kind][place].split([*sizes.values()]), strict=True))

        self.int64, self.int32, self.bool = parts("int64"), parts("int32"), parts("bool")


@contextmanager
def counted_synchronisations() -> Iterator[list[Any]]:
    """Collect warnings, torch's about operations that wait for the GPU among them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Record:
    """What must not grow, and the time of a step, after a round of chunks."""

    steps: int
    rss_kib: int
    objects: int
    torch_kib: int
    compiled: int
    kept: int
    """Entries of containers that managers keep between calls."""
    synchronisations: int
    cpu_us_per_step: float

    @classmethod
    def of(cls, soaked: list[Soaked], synchronisations: int, cpu_us_per_step: float) -> Record:
        gc.collect()
        managers = [world.tables for world in soaked]
        kept = kept_by(*managers)
        on_gpu = soaked[0].device.type == "cuda"
        allocated = torch.cuda.memory_allocated() if on_gpu else kept.tensor_bytes
        return cls(
            sum(world.steps for world in soaked),
            resident_kib(),
            len(gc.get_objects()),
            allocated // 1024,
            sum(compiled_kernels(tables) for tables in managers),
            kept.entries,
            synchronisations,
            round(cpu_us_per_step, 1),
        )


def compiled_kernels(tables: AscendBlockTables) -> int:
    launcher = getattr(tables._backend, "launcher", None)
    return launcher.compiled if launcher else 0


def soak(device: str, steps: int, seed: int, minutes: float) -> dict[str, Any]:
    """Soak one process; stops at the first mismatch, or when the minutes are over."""
    soaked = [Soaked(world, 1000 * seed + n, device) for n, world in enumerate(WORLDS)]
    started, failures, records, done = time.monotonic(), [], [], 0
    try:
        while done < steps and time.monotonic() - started < 60 * minutes:
            synchronisations, begun, before = 0, time.process_time(), done
            for world in soaked:
                count = min(CHUNK, steps - done)
                synchronisations += world.run(count)
                done += count
            each = (time.process_time() - begun) * 1e6 / (done - before)
            records.append(Record.of(soaked, synchronisations, each))
    except Mismatch as error:
        failures.append(f"seed {seed}: {error}")
    growth = grown(records)
    failures += [
        f"seed {seed}: {name} grew by {growth[name]} after the first tenth"
        for name, allowed in GROWTH_ALLOWED.items()
        if growth.get(name, 0) > allowed
    ]
    if synchronisations := sum(record.synchronisations for record in records):
        failures.append(f"seed {seed}: {synchronisations} synchronisations during steps")
    every = max(-(-len(records) // KEPT_RECORDS), 1)
    return {
        "seed": seed,
        "steps": sum(world.steps for world in soaked),
        "seconds": round(time.monotonic() - started, 1),
        "failures": failures,
        "cells_compared": sum(world.compared for world in soaked),
        "kinds": dict(sum((world.kinds for world in soaked), Counter())),
        "faults_as_expected": dict(sum((world.faults for world in soaked), Counter())),
        "growth_after_first_tenth": growth,
        "records": [asdict(record) for record in records[::every]],
    }


def grown(records: list[Record]) -> dict[str, float]:
    """By how much the most after the first tenth exceeds the most in it; and the time of a step."""
    tenth = max(len(records) // 10, 1)
    first, rest = records[:tenth], records[tenth:]
    if not rest:
        return {}
    growth: dict[str, float] = {
        name: max(getattr(record, name) for record in rest)
        - max(getattr(record, name) for record in first)
        for name in GROWTH_ALLOWED
    }
    means = [
        sum(record.cpu_us_per_step for record in part) / len(part)
        for part in (first, records[-tenth:])
    ]
    return growth | {"last_tenth_over_first_time": round(means[1] / means[0], 3)}


def in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Several processes side by side, each with its seed and its part of the steps."""
    count = options.processes
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.json" for n in range(count)]
        running = []
        for n, path in enumerate(paths):
            steps = options.steps * (n + 1) // count - options.steps * n // count
            arguments = ["--device", options.device, "--steps", steps, "--seed", options.seed + n]
            arguments += ["--minutes", options.minutes, "--json", path]
            command = [sys.executable, "-m", "bench.soak", *map(str, arguments)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for process in running:
            process.wait()
        reports = []
        for n, path in enumerate(paths):
            if path.exists():
                reports += json.loads(path.read_text())["processes"]
            else:
                died = f"seed {options.seed + n}: the process ended without a result"
                reports.append({"steps": 0, "failures": [died]})
        return reports


def summary(options: argparse.Namespace, reports: list[dict[str, Any]]) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "backend": env.BACKEND.read() or options.device,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "worlds": [world.name for world in WORLDS],
        "steps": sum(report["steps"] for report in reports),
        "failures": [failure for report in reports for failure in report["failures"]],
        "allowed": GROWTH_ALLOWED,
        "processes": reports,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=1_000_000, help="in all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no chunk after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.processes > 1:
        reports = in_processes(options)
    else:
        reports = [soak(options.device, options.steps, options.seed, options.minutes)]
    result = summary(options, reports)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['steps']:,} steps, {len(result['failures'])} failures", flush=True)
    print(*result["failures"], sep="\n")
    return int(bool(result["failures"]) or not result["steps"])


if __name__ == "__main__":
    sys.exit(main())
