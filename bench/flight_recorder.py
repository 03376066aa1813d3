"""What the flight recorder costs on a CUDA GPU, and that a recorded run replays to the same bits.

    python -m bench.flight_recorder [--steps 400] [--rounds 9] [--save FILE]

Host time of a decode step with its appends, by managers that take turns: recorder off, on, and on
with a watch for faults; the steps are enqueued without waiting. Then a run of eager calls and of
replays of a graph that holds `compute_slot_mappings` and `map_tokens`: the recording is replayed
on the GPU and on the CPU, and all slots are compared with those of the run, call by call. Exit
status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from fused_slots import AscendBlockTables, KVCacheGroup, SlotMappingMode
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import load_schedule

NUM_REQS, CONTEXT, KEPT = 256, 4096, 256
GROUPS = [
    KVCacheGroup(16, CONTEXT // 16),
    KVCacheGroup(32, CONTEXT // 32, kernel_block_size=16, sliding_window_reach=1023),
    KVCacheGroup(16, CONTEXT // 16, sliding_window_reach=511),
    KVCacheGroup(CONTEXT, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(8, 1, circular=True),
    KVCacheGroup(64, CONTEXT // 64),
]
WAYS = {
    "off": {},
    "on": {"FUSED_SLOTS_RECORD": str(KEPT)},
    "on, watching faults": {
        "FUSED_SLOTS_RECORD": str(KEPT),
        "FUSED_SLOTS_RECORD_FAULTS": "null_block",
    },
}


def build(way: str, device: str, max_num_reqs: int, tokens: int) -> AscendBlockTables:
    with mock.patch.dict(os.environ, WAYS[way]):
        tables = AscendBlockTables.from_groups(
            GROUPS, max_num_reqs=max_num_reqs, max_num_batched_tokens=tokens, device=device
        )
    tables.warmup()
    return tables


class Decoding:
    """A manager whose requests decode, a sixteenth of them with a new block in each step."""

    def __init__(self, way: str, device: str) -> None:
        begin = _allocated(device)
        self.tables = build(way, device, NUM_REQS, 8192)
        self.device, self.count = device, 0
        for row in range(NUM_REQS):
            ids = [[1 + (row + i) % 999 for i in range(g.max_num_blocks // 2)] for g in GROUPS]
            ids[3:5] = [[row], [row]]
            self.tables.append_block_ids(row, ids, True)
        self.tables.apply_staged_writes()
        self.bytes_of_construction = _allocated(device) - begin
        self.rows = torch.arange(NUM_REQS, dtype=torch.int32, device=device)
        self.starts = torch.arange(NUM_REQS + 1, dtype=torch.int32, device=device)
        self.positions = torch.full((NUM_REQS,), CONTEXT // 2 - 1, device=device)
        self.computed = torch.full_like(self.rows, CONTEXT // 2 - 1)

    def step(self) -> None:
        self.count += 1
        for row in range(self.count % 16, NUM_REQS, 16):
            self.tables.write_block_ids(row, (100, 50, 100, 1, 1, 25), ([7], [7], [7], [], [], [7]))
        self.tables.step(
            self.rows,
            self.starts,
            self.positions,
            num_tokens_padded=NUM_REQS,
            num_computed_tokens=self.computed,
        )

    def microseconds(self, steps: int) -> float:
        """Host time of a step."""
        taken = []
        for _ in range(steps):
            begin = time.perf_counter_ns()
            self.step()
            taken.append(time.perf_counter_ns() - begin)
            if self.count % 16 == 0:
                _wait(self.device)
        return statistics.median(taken) / 1000


def cost(device: str, steps: int, rounds: int) -> dict[str, object]:
    """Medians over rounds that take turns, and the device memory of the recorder."""
    engines = {way: Decoding(way, device) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, engine in engines.items():
            taken[way].append(engine.microseconds(steps))
            if turn == 0:
                taken[way].clear()
    report: dict[str, object] = {}
    for way, engine in engines.items():
        low, middle, high = statistics.quantiles(taken[way], n=4)
        recorder = engine.tables.recorder
        report[way] = {
            "host_us_a_step": [round(value, 2) for value in (low, middle, high)],
            "device_bytes_at_construction": engine.bytes_of_construction,
            "device_bytes_of_the_recorder": 0 if recorder is None else recorder.device_bytes,
        }
        print(f"{way:22}{json.dumps(report[way])}", flush=True)
    return report


def run_with_graphs(device: str) -> tuple[AscendBlockTables, list[torch.Tensor]]:
    """Random steps and graph replays; the slots of every call that mapped, in order."""
    chance = random.Random(3)
    tables = build("on", device, 16, 128)
    assert tables.recorder is not None
    tables.recorder.num_calls = 60
    rows = torch.zeros(8, dtype=torch.int32, device=device)
    starts = torch.zeros(9, dtype=torch.int32, device=device)
    positions = torch.zeros(64, dtype=torch.int64, device=device)
    drafts = torch.zeros(8, dtype=torch.int64, device=device)
    graph = None
    if device != "cpu":
        tables.compute_slot_mappings(rows, starts, positions, 64)
        tables.map_tokens(rows, drafts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tables.compute_slot_mappings(rows, starts, positions, 64)
            tables.map_tokens(rows, drafts)
    seen = []
    for _ in range(200):
        if chance.random() < 0.8:
            ids = [[chance.randrange(1, 99) for _ in range(min(g.max_num_blocks, 2))]
                   for g in GROUPS]  # fmt: skip
            tables.append_block_ids(chance.randrange(16), ids, True)
        lengths = [chance.randrange(8) for _ in range(8)]
        rows.copy_(torch.tensor([chance.randrange(-1, 17) for _ in range(8)]))
        starts.copy_(torch.tensor([0, *(sum(lengths[: i + 1]) for i in range(8))]))
        positions.copy_(torch.tensor([chance.randrange(40) for _ in range(64)]))
        drafts.copy_(torch.tensor([chance.randrange(40) for _ in range(8)]))
        if chance.random() < 0.5:
            tables.step(rows, starts, positions)
            seen.append(tables.slot_mappings.clone())
        else:
            tables.apply_staged_writes()
            if graph is None:
                tables.compute_slot_mappings(rows, starts, positions, 64)
                tables.map_tokens(rows, drafts)
            else:
                graph.replay()
            seen.append(tables.slot_mappings.clone())
            seen.append(tables._backend.draft_slot_mappings.clone())
    return tables, seen


def verify(device: str) -> dict[str, object]:
    """Replay the recorded run on its device and on the CPU, call by call."""
    tables, seen = run_with_graphs(device)
    with tempfile.TemporaryDirectory() as folder:
        schedule = load_schedule(tables.save_recording(Path(folder, "run.npz.xz")))
    report: dict[str, object] = {
        "calls": len(schedule),
        "calls_of_graphs": schedule.metadata["calls_of_graphs"],
    }
    mapped = [step.call.drafts for step in schedule if step.call.maps or step.call.drafts]
    expected = seen[len(seen) - len(mapped) :]
    digests = set()
    for where in {device: 0, "cpu": 0}:
        replay, place, wrong = Replay(schedule, device=where), 0, 0
        for replayed in replay:
            call = replayed.step.call
            if call is None or not (call.maps or call.drafts):
                continue
            own = replay.tables._backend
            slots = own.draft_slot_mappings if call.drafts else own.slot_mappings
            wrong += not torch.equal(slots.cpu(), expected[place].cpu())
            place += 1
        digests.add(replay.digest)
        report[f"replayed on {where}"] = {
            "calls_compared": place,
            "calls_that_differ": wrong,
            "mismatches": replay.num_mismatches,
        }
    report["digests"] = len(digests)
    return report


def is_good(report: dict[str, object]) -> bool:
    replays = [each for name, each in report.items() if name.startswith("replayed")]
    clean = all(
        isinstance(each, dict)
        and each["calls_compared"] > 0
        and not each["calls_that_differ"] + each["mismatches"]
        for each in replays
    )
    return clean and report["digests"] == 1


def _allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    document: dict[str, object] = {
        "torch": torch.__version__,
        "device": "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "requests": NUM_REQS,
        "groups": len(GROUPS),
        "calls_kept": KEPT,
        "run": verify(arguments.device),
    }
    print(json.dumps(document["run"], indent=2), flush=True)
    document["cost"] = cost(arguments.device, arguments.steps, arguments.rounds)
    if arguments.save:
        arguments.save.write_text(json.dumps(document, indent=2) + "\n")
    good = is_good(document["run"])  # type: ignore[arg-type]
    return 0 if good and (arguments.device == "cpu" or document["run"]["calls_of_graphs"]) else 1  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
