"""The device that parts run on: an NPU, or a CPU that stands in for one in a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.ascend_rows import CONTEXT, INTERLEAVE, ROWS, Row
from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup
from fused_slots.backends import parse_device

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NeedsAnNpu(Exception):
    """A part that only an NPU can do."""


class Device:
    """What parts ask of a device; a rehearsal brings another.

    Args:
        name: "npu:0" or "cpu".
        quick: whether everything is done once or twice only, to try the parts themselves.
    """

    def __init__(self, name: str, quick: bool = False) -> None:
        self.name, self.quick = name, quick
        self.torch = parse_device(name)

    def few(self, number: int) -> int:
        """So many, or very few."""
        return min(number, 2) if self.quick else number

    @property
    def rows(self) -> dict[str, Row]:
        """All batches, or a small one."""
        small = "twelve groups, 4 decodes"
        return {small: ROWS[small]} if self.quick else ROWS

    @property
    def is_npu(self) -> bool:
        return self.torch.type == "npu"

    @property
    def npu(self) -> Any:
        """torch.npu. Raises NeedsAnNpu."""
        if not self.is_npu:
            raise NeedsAnNpu(self.name)
        return torch.npu  # type: ignore[attr-defined]

    @property
    def cores(self) -> int:
        """Vector cores. Raises NeedsAnNpu."""
        tables = self.tables((KVCacheGroup(16, 8),), 1, 16)
        cores = getattr(tables._backend, "num_cores", 0)
        if not cores:
            raise NeedsAnNpu(self.name)
        return int(cores)

    def zeros(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.torch)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """A kernel of kernels.py. Raises NeedsAnNpu."""
        assert self.npu
        kernel[(programs,)](*arguments, **constants)

    def synchronize(self) -> None:
        if self.is_npu:
            self.npu.synchronize()

    def tables(
        self, groups: tuple[KVCacheGroup, ...], num_reqs: int, capacity: int, **settings: Any
    ) -> AscendBlockTables:
        return AscendBlockTables.from_groups(
            groups, max_num_reqs=num_reqs, max_num_batched_tokens=capacity, device=self.name,
            **settings,
        )  # fmt: skip

    def microseconds(self, call: Callable[[], object], launches: int, rounds: int) -> float:
        """Of one call: the median of `rounds`, each between two events around `launches` calls, or
        by the clock of a CPU."""
        call()
        times = []
        launches = self.few(launches)
        for _ in range(self.few(rounds)):
            if self.is_npu:
                first, last = (self.npu.Event(enable_timing=True) for _ in range(2))
                first.record()
            begin = time.perf_counter()
            for _ in range(launches):
                call()
            took = (time.perf_counter() - begin) * 1e6
            if self.is_npu:
                last.record()
                last.synchronize()
                took = first.elapsed_time(last) * 1e3
            times.append(took / launches)
        return round(median(times), 3)


def filled(device: Device, row: Row) -> AscendBlockTables:
    """A manager whose rows, one a request, hold a whole context of blocks of their own."""
    sharded = row.ranks > 1
    groups = tuple(KVCacheGroup(k, CONTEXT // k, dcp_sharded=sharded) for k in row.sizes)
    parallel = ContextParallel(row.ranks, 0, INTERLEAVE if sharded else 1)
    tables = device.tables(groups, len(row.lengths), row.capacity, context_parallel=parallel)
    for at in range(len(row.lengths)):
        blocks = [CONTEXT // size for size in row.sizes]
        tables.append_block_ids(
            at, [list(range(1 + at * n, 1 + at * n + n)) for n in blocks], overwrite=True
        )
    tables.apply_staged_writes()
    return tables


def batch(device: Device, row: Row, turn: int) -> Tensors:
    """A batch of these lengths; from turn 1 on in another order of rows and at other positions."""
    random = torch.Generator().manual_seed(turn)
    lengths, first = torch.tensor(row.lengths), torch.tensor(row.first)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(lengths, 0)
    rows = torch.arange(len(lengths), dtype=torch.int32)
    if turn:
        rows = rows[torch.randperm(len(rows), generator=random)]
        highest = CONTEXT - int(lengths.max())
        first = torch.randint(0, highest + 1, (len(rows),), generator=random)
    within = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1].long(), lengths)
    positions = torch.repeat_interleave(first, lengths) + within
    return rows.to(device.torch), starts.to(device.torch), positions.to(device.torch)
