"""Correctness on a GPU in parts of a few minutes: python -m bench.cuda_verify PART --json FILE.

- graphs: captured compute_slot_mappings, map_tokens and step, replayed with changing contents of
  every input in the captured sizes, lengths of replay and the null block among them; rows are also
  cleared and cut between replays; allocations and addresses must not change;
- flight: steps queued behind a sleeping kernel while the host stages the next ones: each step sees
  its own writes (1, 2, 3, 5 and 40 steps, more than the ring of packets holds);
- numbers: slots beyond 2^31, rows x stride beyond 2^31 elements, int32 and int64 outputs;
- shapes: 1,000 mixed shapes after warm-up compile nothing.

Random steps are `python -m tests.simulator --backend cuda`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fused_slots import AscendBlockTables, KVCacheGroup, SlotMappingMode, reference

GROUPS = (
    KVCacheGroup(16, 64),
    KVCacheGroup(64, 16, 32, sliding_window_reach=100),
    KVCacheGroup(48, 24),
    KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(8, 1, circular=True, prefix_cacheable=False),
)
NUM_ROWS, CAPACITY, WINDOW, NULL_BLOCK = 32, 512, 8, 3


class World:
    """A manager, a model of its rows, and input tensors at fixed addresses."""

    def __init__(self, seed: int, num_reqs: int, num_tokens: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tables = AscendBlockTables.from_groups(
            GROUPS,
            max_num_reqs=NUM_ROWS,
            max_num_batched_tokens=CAPACITY,
            device="cuda",
            replay_window=WINDOW,
            null_block_id=NULL_BLOCK,
        )
        self.tables.warmup()
        self.rows: list[list[list[int]]] = [[[] for _ in range(NUM_ROWS)] for _ in GROUPS]
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.by_length = seed % 2 == 1
        """Whether tokens are replayed by replay_len instead of the window."""
        self.idx = torch.zeros(num_reqs, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        self.replay = torch.zeros(num_reqs, dtype=torch.int32, device="cuda")
        self.length = torch.zeros(num_reqs, dtype=torch.int32, device="cuda")
        self.draft_rows = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")
        self.draft_positions = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")

    def write_rows(self) -> None:
        """Start some rows anew and let others grow."""
        for row in self.rng.permutation(NUM_ROWS)[:6].tolist():
            lists = []
            for g, group in enumerate(GROUPS):
                count = int(self.rng.integers(1, group.max_num_blocks + 1))
                ids = self.rng.integers(1, (10000, 6)[row % 2], count).tolist()
                n = group.columns_per_block
                self.rows[g][row] = [k * n + part for k in ids for part in range(n)]
                lists.append(ids)
            self.tables.append_block_ids(row, lists, overwrite=True)
        cleared, cut = self.rng.permutation(NUM_ROWS)[:2].tolist()
        self.tables.clear_row(cleared)
        keep = [
            len(rows[cut]) // group.columns_per_block // 2
            for rows, group in zip(self.rows, GROUPS, strict=True)
        ]
        self.tables.write_block_ids(cut, keep, [[] for _ in GROUPS])
        for rows, group, blocks in zip(self.rows, GROUPS, keep, strict=True):
            rows[cleared] = []
            rows[cut] = rows[cut][: blocks * group.columns_per_block]

    def new_inputs(self) -> None:
        """Other contents in the same sizes: rows, lengths, positions, replayed tokens."""
        rng, num_reqs = self.rng, self.num_reqs
        idx = rng.integers(-1, NUM_ROWS, num_reqs)
        cuts = np.sort(rng.integers(0, self.num_tokens + 1, num_reqs))
        starts = np.concatenate([[0], cuts])
        positions = rng.integers(-3, 1100, self.num_tokens)
        replay = rng.integers(0, 2, num_reqs) * rng.integers(0, 500, num_reqs)
        for tensor, values in (
            (self.idx, idx),
            (self.starts, starts),
            (self.positions, positions),
            (self.replay, replay),
            (self.length, rng.integers(-2, 40, num_reqs)),
            (self.draft_rows, rng.integers(-1, NUM_ROWS, self.num_tokens)),
            (self.draft_positions, rng.integers(-3, 1100, self.num_tokens)),
        ):
            tensor.copy_(torch.from_numpy(values))

    @property
    def replayed(self) -> dict[str, torch.Tensor]:
        """The keywords of a call that say what is replayed."""
        keywords = {"replay_start": self.replay}
        return keywords | {"replay_len": self.length} if self.by_length else keywords

    def expected_slots(self) -> list[list[int]]:
        return reference.slot_mappings(
            GROUPS,
            self.rows,
            self.idx.tolist(),
            self.starts.tolist(),
            self.positions.tolist(),
            CAPACITY,
            replay_start=self.replay.tolist(),
            replay_window=WINDOW,
            replay_len=self.length.tolist() if self.by_length else None,
            null_block_id=NULL_BLOCK,
        )

    def expected_drafts(self) -> list[list[int]]:
        count = self.num_tokens
        starts = list(range(count + 1))
        rows, positions = self.draft_rows.tolist(), self.draft_positions.tolist()
        return reference.slot_mappings(
            GROUPS, self.rows, rows, starts, positions, CAPACITY, null_block_id=NULL_BLOCK
        )

    def expected_gathered(self) -> list[list[list[int]]]:
        widths = [table.shape[1] for table in self.tables.input_block_tables]
        return [
            [
                reference.gathered_row(group, self.rows[g][row] if row >= 0 else [], widths[g])
                for row in self.idx.tolist()
            ]
            for g, group in enumerate(GROUPS)
        ]


def graphs(replays: int) -> dict[str, int]:
    """Replay captured launches with other contents and compare with the scalar reference."""
    done = mismatches = allocations = moved = 0
    for seed, (num_reqs, num_tokens) in enumerate(
        ((8, 8), (20, 20), (20, 300), (32, 128), (3, 400))
    ):
        world = World(seed, num_reqs, num_tokens)
        tables = world.tables
        world.write_rows()
        tables.apply_staged_writes()
        world.new_inputs()
        arguments = (world.idx, world.starts, world.positions)
        graph, whole = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            slots = tables.compute_slot_mappings(*arguments, num_tokens, **world.replayed)
            drafts = tables.map_tokens(world.draft_rows, world.draft_positions)
        with torch.cuda.graph(whole):
            tables.step(*arguments, num_tokens_padded=num_tokens, **world.replayed)
        addresses = [t.data_ptr() for t in (slots, drafts, *tables.input_block_tables)]
        torch.cuda.synchronize()

        for replay in range(replays // 5):
            if replay % 10 == 0:
                world.write_rows()
                tables.apply_staged_writes()
            world.new_inputs()
            tables.slot_mappings.fill_(7)
            with_step = replay % 2 == 1
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            (whole if with_step else graph).replay()
            torch.cuda.synchronize()
            allocations += torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
            right = tables.slot_mappings.tolist() == world.expected_slots()
            if with_step:
                gathered = [t[:num_reqs].tolist() for t in tables.input_block_tables]
                right = right and gathered == world.expected_gathered()
            else:
                drafted = [row[:num_tokens] for row in world.expected_drafts()]
                right = right and drafts.tolist() == drafted
            mismatches += not right
            done += 1
        now = [t.data_ptr() for t in (slots, drafts, *tables.input_block_tables)]
        moved += now != addresses

    return {"replays": done, "mismatches": mismatches, "allocations": allocations, "moved": moved}


def flight(repeats: int) -> dict[str, int]:
    """Queue steps behind a sleeping kernel; each must see the writes that preceded it."""
    done = mismatches = 0
    for repeat in range(repeats):
        for queued in (1, 2, 3, 5, 40):
            world = World(repeat, 8, 32)
            seen = []
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            for _ in range(queued):
                world.write_rows()
                world.new_inputs()
                world.tables.step(world.idx, world.starts, world.positions, **world.replayed)
                copies = [table[:8].clone() for table in world.tables.input_block_tables]
                inputs = [
                    t.clone()
                    for t in (world.idx, world.starts, world.positions, world.replay, world.length)
                ]
                rows = [[list(row) for row in group] for group in world.rows]
                seen.append((world.tables.slot_mappings.clone(), copies, inputs, rows))
            for slots, gathered, inputs, rows in seen:
                world.rows = rows
                world.idx, world.starts, world.positions, world.replay, world.length = inputs
                right = slots.tolist() == world.expected_slots()
                right &= [table.tolist() for table in gathered] == world.expected_gathered()
                mismatches += not right
                done += 1
    return {"steps": done, "mismatches": mismatches}


def numbers(_: int) -> dict[str, int]:
    """Numbers beyond int32, each against Python's own arithmetic."""
    wrong = 0
    big = 2**27
    tables = AscendBlockTables([16], 2, 8, [4], "cuda")
    tables.append_block_ids(0, [[big, big + 1, 2**31 - 1]], overwrite=True)
    one = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    row = torch.tensor([0], device="cuda")
    positions = torch.tensor([0, 17, 33], device="cuda")
    _, slots = tables.step(row, one, positions, num_tokens_padded=3)
    wrong += slots[0].tolist() != [big * 16, (big + 1) * 16 + 1, (2**31 - 1) * 16 + 1]
    # Rows x stride beyond 2^31 elements: 17,000 rows of 131,072 columns, 8.9 GB each table.
    rows, width = 17000, 131072
    tables = AscendBlockTables([16], rows, 8, [width], "cuda")
    for index in (0, rows - 1):
        ids = [index + 3] * (width - 1) + [2**26 + index]
        tables.append_block_ids(index, [ids], overwrite=True)
    tables.apply_staged_writes()
    idx = torch.tensor([rows - 1, 0, rows - 1], device="cuda")
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
    positions = torch.tensor([width * 16 - 1, width * 16 - 16, 5], device="cuda")
    gathered, slots = tables.step(idx, starts, positions, num_tokens_padded=3)
    expected = [(2**26 + rows - 1) * 16 + 15, 2**26 * 16, (rows + 2) * 16 + 5]
    wrong += slots[0].tolist() != expected
    wrong += gathered[0][0, -1].item() != 2**26 + rows - 1 or gathered[0][1, 0].item() != 3
    narrow = torch.zeros((1, 8), dtype=torch.int32, device="cuda")
    out = tables.compute_slot_mappings(idx, starts, positions, 3, out=narrow)
    wrong += out[0].tolist() != expected
    return {"checks": 5, "mismatches": int(wrong)}


def shapes(count: int) -> dict[str, int]:
    """Mixed shapes after warm-up compile nothing."""
    rng = np.random.default_rng(0)
    world = World(0, 1, 1)
    world.write_rows()
    tables = world.tables
    tables.apply_staged_writes()
    compiled = tables._backend.launcher.compiled  # type: ignore[attr-defined]
    for _ in range(count):
        num_reqs, num_tokens = int(rng.integers(0, 33)), int(rng.integers(0, 513))
        cuts = np.sort(rng.integers(0, num_tokens + 1, max(num_reqs - 1, 0)))
        starts = np.concatenate([[0], cuts, [num_tokens] * min(num_reqs, 1)]).astype(np.int32)
        dtype = (torch.int32, torch.int64)[int(rng.integers(2))]
        idx = torch.from_numpy(rng.integers(-1, NUM_ROWS, num_reqs)).to("cuda", dtype)
        positions = torch.from_numpy(rng.integers(0, 1000, num_tokens)).cuda()
        arguments = (idx, torch.from_numpy(starts).cuda(), positions)
        tables.step(*arguments, num_tokens_padded=num_tokens)
        tables.compute_slot_mappings(*arguments, num_tokens)
        tables.map_tokens(idx, positions[:num_reqs] if len(positions) >= num_reqs else idx.long())
        world.write_rows()
    return {"shapes": count, "compiled": tables._backend.launcher.compiled - compiled}  # type: ignore[attr-defined]


PARTS: dict[str, tuple[Callable[[int], dict[str, int]], int]] = {
    "graphs": (graphs, 10_000),
    "flight": (flight, 20),
    "numbers": (numbers, 1),
    "shapes": (shapes, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run, count = PARTS[options.part]
    begin = time.perf_counter()
    result = run(options.count or count)
    report = {"part": options.part, **result, "seconds": round(time.perf_counter() - begin, 1)}
    print(report)
    if options.json:
        card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps(report | card))
    if any(result.get(bad) for bad in ("mismatches", "allocations", "moved", "compiled")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
