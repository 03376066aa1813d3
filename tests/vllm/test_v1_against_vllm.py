"""Our v1 tables against vLLM's own: host rows, device rows and slots, bit for bit.

Rows are in batch order, as the v1 runner keeps them: a request that ends is cleared, and the last
one moves into its place. In contract: every token's column is filled.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import torch
from vllm.v1.worker import block_table as v1_module

from fused_slots.vllm.v1 import MultiGroupBlockTable

NUM_STEPS = 40
STATE = v1_module.SlotMappingMode.NONE
PAGED = v1_module.SlotMappingMode.TOKEN_TO_KV_SLOT


class Life:
    """One configuration, both tables, and the requests in the batch."""

    def __init__(self, seed: int) -> None:
        self.random = rng = Random(seed)
        self.max_num_reqs = rng.randint(1, 6)
        self.capacity = rng.choice([16, 24, 33])
        self.max_len = rng.randint(8, 64)
        count = rng.choice([1, 2, 3, 4])
        self.modes = [STATE if rng.random() < 0.2 else PAGED for _ in range(count)]
        self.block_sizes = [
            self.max_len if mode is STATE else rng.choice([1, 3, 4, 8, 16]) for mode in self.modes
        ]
        self.max_num_blocks = [-(-self.max_len // size) for size in self.block_sizes]
        arguments = {
            "max_num_reqs": self.max_num_reqs,
            "max_num_batched_tokens": self.capacity,
            "pin_memory": False,
            "device": torch.device("cpu"),
            "block_sizes": self.block_sizes,
            "max_num_blocks": self.max_num_blocks,
            "cp_kv_cache_interleave_size": 1,
            "slot_mapping_modes": self.modes,
        }
        self.tables = (
            v1_module.MultiGroupBlockTable(**arguments),
            MultiGroupBlockTable(**arguments),
        )
        self.requests: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()

    def call(self, method: str, *arguments: Any) -> None:
        for tables in self.tables:
            getattr(tables, method)(*arguments)
        self.counts[method] += 1

    def step(self) -> None:
        rng = self.random
        self._remove()
        while len(self.requests) < self.max_num_reqs and rng.random() < 0.7:
            request = {"target": rng.randint(1, self.max_len), "computed": 0}
            request["blocks"] = [[] for _ in self.modes]
            self.requests.append(request)
            self._grow(len(self.requests) - 1, rng.randint(1, request["target"]), "add_row")
        if len(self.requests) > 1 and rng.random() < 0.2:
            a, b = rng.sample(range(len(self.requests)), 2)
            self.call("swap_row", a, b)
            self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
        self._run()

    def _remove(self) -> None:
        """Clear rows, then slide the last requests into the holes."""
        rng, requests = self.random, self.requests
        for row in reversed(range(len(requests))):
            done = requests[row]["computed"] >= requests[row]["target"]
            if not done and rng.random() > 0.08:
                continue
            self.call("clear_row", row)
            last = len(requests) - 1
            if row != last:
                self.call("move_row", last, row)
                requests[row] = requests[last]
            requests.pop()

    def _grow(self, row: int, num_tokens: int, method: str) -> None:
        rng, request = self.random, self.requests[row]
        new = []
        for size, blocks in zip(self.block_sizes, request["blocks"], strict=True):
            missing = max(-(-num_tokens // size) - len(blocks), 0)
            last_id = (2**31 - 1) // size - 1
            ids = [
                min(rng.randint(1, 1 << rng.choice([6, 20, 30])), last_id) for _ in range(missing)
            ]
            new.append(ids)
            blocks += ids
        self.call(method, tuple(new), row)

    def _run(self) -> None:
        """Commit and map a batch of all requests; now and then pad it as a graph would."""
        rng, requests = self.random, self.requests
        starts, positions = [0], []
        for row, request in enumerate(requests):
            left = request["target"] - request["computed"]
            count = min(rng.choice([1, 1, rng.randint(1, 12)]), left, self.capacity - starts[-1])
            self._grow(row, request["computed"] + count, "append_row")
            positions += range(request["computed"], request["computed"] + count)
            starts.append(len(positions))
            request["computed"] += count
        num_reqs = len(requests)
        committed = rng.choice([num_reqs, self.max_num_reqs])
        self.call("commit_block_table", committed)
        tail = [starts[-1]] * rng.choice([0, 2])
        self.call(
            "compute_slot_mapping",
            num_reqs,
            torch.tensor(starts + tail, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
        )
        self._compare(num_reqs, committed, len(positions))

    def _compare(self, num_reqs: int, committed: int, num_tokens: int) -> None:
        for g, (theirs, ours) in enumerate(
            zip(*(t.block_tables for t in self.tables), strict=True)
        ):
            assert (ours.num_blocks_per_row == theirs.num_blocks_per_row).all()
            for row in range(num_reqs):
                filled = theirs.num_blocks_per_row[row]
                their_row = theirs.get_device_tensor(committed)[row, :filled]
                our_row = ours.get_device_tensor(committed)[row, :filled]
                assert torch.equal(our_row, their_row)
                assert (ours.get_numpy_array()[row, :filled] == their_row.numpy()).all()
            assert not ours.get_device_tensor(committed)[num_reqs:].any()
            assert ours.block_table.gpu.shape == theirs.block_table.gpu.shape
            if self.modes[g] is PAGED:
                assert torch.equal(ours.slot_mapping.gpu, theirs.slot_mapping.gpu)
                assert ours.slot_mapping.gpu.dtype == theirs.slot_mapping.gpu.dtype
                self.counts["slots"] += num_tokens
        self.counts["steps"] += 1


def test_random_steps_agree_with_vllm(num_lives: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(num_lives):
        life = Life(seed)
        try:
            for _ in range(NUM_STEPS):
                life.step()
        except Exception as error:
            raise AssertionError(f"life {seed}, step {life.counts['steps']}") from error
        counts += life.counts
    assert counts["steps"] == num_lives * NUM_STEPS
    rare = ("add_row", "append_row", "clear_row", "move_row", "swap_row")
    assert min(counts[name] for name in rare) > num_lives
    assert counts["slots"] > 100 * num_lives
    print(f"\n{dict(counts)}")
