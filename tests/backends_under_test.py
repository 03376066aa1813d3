"""Managers to test on every backend, and short ways to drive them.

A test that takes a `make_tables` fixture runs once per entry of `BACKENDS`:

    @pytest.fixture(params=BACKENDS, ids=str)
    def make_tables(request): return request.param
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from fused_slots import PAD_SLOT_ID, AscendBlockTables, KVCacheGroup

Batch = Sequence[tuple[int, Sequence[int]]]
"""Per batch entry, its row and the positions of its tokens."""


@dataclass(frozen=True)
class MakeTables:
    """A factory of managers on one device; called with groups and settings of `from_groups`."""

    device: str = "cpu"
    backend: str = ""
    """FUSED_SLOTS_BACKEND while a manager is built; empty = what the device selects."""

    def __str__(self) -> str:
        return self.backend or self.device

    def __call__(
        self,
        groups: Sequence[KVCacheGroup],
        rows: Mapping[int, Sequence[Sequence[int]]] | None = None,
        **settings: Any,
    ) -> AscendBlockTables:
        """A manager whose rows hold these block ids already (per row, one list per group)."""
        sizes = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "device": self.device}
        with mock.patch.dict(os.environ, {"FUSED_SLOTS_BACKEND": self.backend}):
            tables = AscendBlockTables.from_groups(groups, **{**sizes, **settings})
        for row, block_ids in (rows or {}).items():
            tables.append_block_ids(row, block_ids, overwrite=True)
        tables.apply_staged_writes()
        return tables


def _backends() -> list[MakeTables]:
    """The CPU, and what this process can run besides: interpreted kernels, a GPU."""
    backends = [MakeTables("cpu")]
    if find_spec("triton") is None:
        return backends
    if os.environ.get("TRITON_INTERPRET") == "1":
        backends.append(MakeTables("cpu", "interpreter"))
    elif torch.cuda.is_available():
        backends.append(MakeTables("cuda"))
    return backends


BACKENDS = _backends()


def int32(tables: AscendBlockTables, values: Sequence[int]) -> torch.Tensor:
    """An int32 vector on the manager's device."""
    return torch.tensor(values, dtype=torch.int32, device=tables.device)


def int64(tables: AscendBlockTables, values: Sequence[int]) -> torch.Tensor:
    """An int64 vector on the manager's device."""
    return torch.tensor(values, dtype=torch.int64, device=tables.device)


def batch_tensors(
    tables: AscendBlockTables, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """idx_mapping, query_start_loc and positions of a batch."""
    starts = [0]
    for _, positions in batch:
        starts.append(starts[-1] + len(positions))
    flat = [position for _, positions in batch for position in positions]
    return (
        int32(tables, [row for row, _ in batch]),
        int32(tables, starts),
        int64(tables, flat),
    )


def slots(
    tables: AscendBlockTables, batch: Batch, replay_start: Sequence[int] | None = None
) -> list[list[int]]:
    """Per group, the slots of the batch's tokens; what lies beyond them is checked to be PAD."""
    idx_mapping, query_start_loc, positions = batch_tensors(tables, batch)
    tables.compute_slot_mappings(
        idx_mapping,
        query_start_loc,
        positions,
        len(positions),
        replay_start=None if replay_start is None else int32(tables, replay_start),
    )
    whole = tables.slot_mappings.tolist()
    for group_slots in whole:
        assert set(group_slots[len(positions) :]) <= {PAD_SLOT_ID}
    return [group_slots[: len(positions)] for group_slots in whole]


def gathered(tables: AscendBlockTables, rows: Sequence[int], **arguments: Any) -> list[Any]:
    """Per group, the gathered tables of these rows as nested lists."""
    result = tables.gather_block_tables(int32(tables, rows), len(rows), **arguments)
    return [table.tolist() for table in result]


def faults(tables: AscendBlockTables) -> list[tuple[str, int, int]]:
    """(code's name, group, count) of the faults since the last call."""
    return [(fault.code.name, fault.group, fault.count) for fault in tables.take_faults()]
