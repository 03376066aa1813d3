"""Random lives of vllm-ascend's v1 tables beside ours: kinds of groups that no scheduler here has.

Rings, state, blocks split by the first candidate that divides them, one or several groups, decode
context parallelism, compressed rows. In contract: a token's column is filled.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as interface

from fused_slots.vllm.ascend_v1 import FusedAscendMultiGroupBlockTable
from tests.releases.ascend_batch import CPU, set_ranks

ROWS, CAPACITY = 5, 40
CHANGES = ("add_row", "append_row", "swap_row", "move_row", "clear_row")
ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


class Life:
    """Two sets of tables of one configuration, and the blocks that each row holds."""

    def __init__(self, seed: int, ours: type[FusedAscendMultiGroupBlockTable], stock: type) -> None:
        self.random = rng = Random(seed)
        self.rules, self.counts = ours.rules, Counter[str]()
        self.ranks = rng.choice([1, 1, 1, 2])
        set_ranks(self.ranks, rank := rng.randrange(self.ranks))
        self.max_len = rng.randint(20, 200)
        kinds = ["paged", "paged", "state"]
        if self.rules.rings and self.ranks == 1:
            kinds.append("ring")
        self.kinds = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
        self.sizes = [rng.choice([16, 32, 48]) for _ in self.kinds]
        candidates = [self._candidates(*pair) for pair in zip(self.kinds, self.sizes, strict=True)]
        arguments: dict[str, Any] = {
            "max_num_reqs": ROWS,
            "max_model_len": self.max_len,
            "max_num_batched_tokens": CAPACITY,
            "pin_memory": False,
            "device": CPU,
            "block_sizes": self.sizes,
            "num_speculative_tokens": rng.choice([0, 1, 3]) if self.ranks == 1 else 0,
            "max_num_blocks": rng.choice([None, [self.blocks(g) + 1 for g in self.groups]]),
            # From 0.30 on each group's sizes are one number by then.
            "kernel_sizes": candidates
            if self.rules.compressed_rows or not self.rules.rings
            else [sizes[0] for sizes in candidates],
            "cp_kv_cache_interleave_size": rng.choice([1, 4, 16]),
            "kv_cache_groups": [
                SimpleNamespace(kv_cache_spec=spec_of(kind, size))
                for kind, size in zip(self.kinds, self.sizes, strict=True)
            ],
        }
        self.tables = stock(**arguments), ours(**arguments)
        assert self.tables[1][0].dcp_rank == rank
        self.held = [[0] * len(self.kinds) for _ in range(ROWS)]

    @property
    def groups(self) -> range:
        return range(len(self.kinds))

    def _candidates(self, kind: str, size: int) -> list[int]:
        if kind != "paged":
            return [0]
        if self.rules.compressed_rows and self.random.random() < 0.5:
            return [7, size + 1, 8]
        return [self.random.choice([size, size // 2, 8])]

    def blocks(self, g: int) -> int:
        """Allocation blocks that hold the longest request on this rank."""
        if self.kinds[g] == "ring":
            return 1
        return -(-self.max_len // (self.sizes[g] * self.ranks))

    def step(self) -> None:
        """Change some rows, then map a batch of all of them, or single tokens."""
        rng = self.random
        for _ in range(rng.randint(1, 4)):
            self._change_row()
        lengths = [self._mapped_length(row) for row in range(ROWS)]
        num_reqs = next((row for row, n in enumerate(lengths) if not n), ROWS)
        starts, positions = [0], []
        for length in lengths[:num_reqs]:
            count = min(rng.choice([1, 1, 3, 8]), length)
            begin = rng.randint(0, length - count)
            positions += range(begin, begin + count)
            starts.append(len(positions))
        offsets = torch.tensor(starts, dtype=torch.int32)
        batch = offsets, torch.tensor(positions, dtype=torch.int64)
        for tables in self.tables:
            tables.commit_block_table(num_reqs)
        g = rng.choice(self.groups)
        alone = rng.random() < 0.3 and self.kinds[g] != "state"
        if num_reqs:
            for tables in self.tables:
                (tables[g] if alone else tables).compute_slot_mapping(num_reqs, *batch)
            self._compare(num_reqs, len(positions), [g] if alone else list(self.groups))
        self.counts["steps"] += 1

    def _change_row(self) -> None:
        rng, row, other = self.random, self.random.randrange(ROWS), self.random.randrange(ROWS)
        name = rng.choice(["append_row", *CHANGES])
        if name in ("add_row", "append_row"):
            held = [0] * len(self.kinds) if name == "add_row" else self.held[row]
            new = [rng.randint(0, self.blocks(g) - held[g]) for g in self.groups]
            self.held[row] = [a + b for a, b in zip(held, new, strict=True)]
            ids = tuple([rng.randint(1, 1 << 20) for _ in range(count)] for count in new)
            arguments: tuple[Any, ...] = (ids, row)
        elif name == "clear_row":
            self.held[row] = [0] * len(self.kinds)
            arguments = (row,)
        elif row == other:
            return
        else:
            moved = [0] * len(self.kinds) if name == "move_row" else self.held[other]
            self.held[row], self.held[other] = moved, self.held[row]
            arguments = (row, other)
        for tables in self.tables:
            getattr(tables, name)(*arguments)
            if name == "move_row":
                tables.clear_row(row)  # the stock tables leave it filled
        self.counts[name] += 1

    def _mapped_length(self, row: int) -> int:
        """Tokens that every group of a row has blocks for."""
        tokens = self.max_len
        for kind, size, blocks in zip(self.kinds, self.sizes, self.held[row], strict=True):
            if kind == "paged":
                tokens = min(tokens, blocks * size * self.ranks)
            elif kind == "ring" and not blocks:
                return 0
        return tokens

    def _compare(self, num_reqs: int, num_tokens: int, mapped: list[int]) -> None:
        stock, ours = self.tables
        for g in self.groups:
            filled = ours[g].num_blocks_per_row
            assert filled.tolist() == stock[g].num_blocks_per_row.tolist()
            for row in range(num_reqs):
                expected, found = (t[g].get_device_tensor(num_reqs)[row] for t in self.tables)
                assert torch.equal(found[: filled[row]], expected[: filled[row]])
                assert not found[filled[row] :].any()
            if g not in mapped or self.kinds[g] == "state":
                continue
            slots, expected = ours[g].slot_mapping.gpu, stock[g].slot_mapping.gpu
            end = CAPACITY
            if self.ranks > 1:
                # The stock tables leave what lies behind the step; on a CPU theirs is the copy.
                end, expected = num_tokens, stock[g].slot_mapping.cpu
            assert torch.equal(slots[:end], expected[:end]), (g, self.kinds)
            assert (slots[num_tokens:] == -1).all()
            self.counts[f"{self.kinds[g]} slots"] += num_tokens


def spec_of(kind: str, size: int) -> Any:
    """A spec of the release's own."""
    if kind == "paged":
        return interface.FullAttentionSpec(block_size=size, **ATTENTION)
    if kind == "ring":
        return interface.CircularBufferSpec(block_size=size, **ATTENTION)
    return interface.MambaSpec(block_size=size, shapes=((4,),), dtypes=(torch.float32,))


def run_lives(count: int, ours: Any, stock: type) -> Counter[str]:
    """So many lives; what was compared."""
    counts: Counter[str] = Counter()
    for seed in range(count):
        life = Life(seed, ours, stock)
        try:
            for _ in range(20):
                life.step()
        except Exception as error:
            raise AssertionError(f"life {seed}, step {life.counts['steps']}") from error
        counts += life.counts
    set_ranks(1, 0)
    return counts


def check_compressed_rows(ours: Any, stock: type) -> None:
    """A group of several layer types has fewer blocks where its first layer keeps fewer tokens."""
    layers = {"a": SimpleNamespace(compress_ratio=4), "b": SimpleNamespace(compress_ratio=1)}
    spec = object.__new__(interface.UniformTypeKVCacheSpecs)
    object.__setattr__(spec, "kv_cache_specs", layers)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    common = {"pin_memory": False, "device": CPU, "block_sizes": [16], "kv_cache_groups": groups}
    for blocks in ([30], [1], None):
        widths = [
            table_class(
                max_num_reqs=ROWS,
                max_model_len=500,
                max_num_batched_tokens=CAPACITY,
                max_num_blocks=blocks,
                kernel_sizes=[[8]],
                **common,
            )[0].block_table.gpu.shape
            for table_class in (ours, stock)
        ]
        assert widths[0] == widths[1], (blocks, widths)
