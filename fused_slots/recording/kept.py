"""What the flight recorder kept, as the steps of a schedule file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.host.packet import unpack_writes
from fused_slots.host.rows import host_half
from fused_slots.host.staging import StagedWrites
from fused_slots.layout import TableLayout
from fused_slots.observe import process_rank
from fused_slots.recording.calls import as_call, input_sizes
from fused_slots.recording.steps import Append, Call, ScheduleStep

Inputs = torch.Tensor | npt.NDArray[np.int32] | None
Packet = tuple[npt.NDArray[np.int32], int]
"""A call's writes as the host packed them, and the number of rows."""


class Recorded(NamedTuple):
    kind: int
    num_entries: int
    num_positions: int
    num_reqs_padded: int
    num_tokens_padded: int
    slots_width: int
    inputs: torch.Tensor | None = None
    writes: Packet | list[Append] | None = None


def as_step(layout: TableLayout, recorded: Recorded, inputs: Inputs) -> ScheduleStep:
    sizes = input_sizes(*recorded[:3], layout.max_num_reqs)
    values = inputs.cpu().numpy() if isinstance(inputs, torch.Tensor) else inputs
    numbers = np.zeros(0, np.int32) if values is None else values[: sum(sizes)]
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    writes = recorded.writes
    if isinstance(writes, tuple):
        writes = _appends(layout, unpack_writes(writes[0], layout, writes[1]))
    return as_call((*recorded[:6], 0), parts, tuple(writes or ()))


def row_step(rows: Sequence[Append]) -> ScheduleStep:
    nothing = np.zeros(0, np.int32)
    call = Call(gathers=False, maps=False, drafts=False, num_reqs_padded=0, num_tokens_padded=0)
    arrays = (nothing, nothing, nothing, nothing.astype(np.int64), nothing)
    return ScheduleStep(tuple(rows), *arrays, (), call=call)


def _appends(layout: TableLayout, writes: StagedWrites) -> list[Append]:
    """Merged writes as calls that write the same columns."""
    appends = []
    n = [group.columns_per_block for group in layout.groups]
    for j, row in enumerate(writes.rows.tolist()):
        starts = writes.starts[j].tolist()
        blocks = tuple(
            (writes.column_ids[begin : begin + count : n[g]] // n[g]).tolist() if start >= 0 else []
            for g, (start, begin, count) in enumerate(
                zip(starts, writes.offsets[j].tolist(), writes.counts[j].tolist(), strict=True)
            )
        )
        if min(starts) < 0:
            appends.append(Append(row, blocks, True, cleared=True))
        elif not any(starts):
            appends.append(Append(row, blocks, True))
        else:
            firsts = tuple(start // per for start, per in zip(starts, n, strict=True))
            appends.append(Append(row, blocks, False, firsts))
    return appends


def rows_of(
    layout: TableLayout, arena: torch.Tensor, num_columns: torch.Tensor
) -> tuple[list[Append], int]:
    """All rows that hold something, and how many cannot be said as allocation blocks."""
    cells, lengths = arena.cpu().numpy(), num_columns.cpu().numpy()
    rows, torn = [], 0
    for row in np.flatnonzero(lengths.any(0)).tolist():
        blocks = []
        for g, group in enumerate(layout.groups):
            begin = layout.offsets[g] + row * layout.widths[g]
            columns = cells[begin : begin + lengths[g, row]]
            ids, whole = as_blocks(columns, group.columns_per_block)
            torn += not whole
            blocks.append(ids)
        rows.append(Append(row, tuple(blocks), True))
    return rows, torn


def as_blocks(columns: npt.NDArray[np.int32], n: int) -> tuple[list[int], bool]:
    """The allocation blocks of filled columns, or null blocks where those are none; which it is."""
    firsts = columns[::n] // n
    expected = np.repeat(firsts, n)[: len(columns)] * n + np.arange(len(columns)) % n
    whole = columns.min(initial=0) >= 0 and bool((columns == expected).all())
    return (firsts if whole else 0 * firsts).tolist(), whole


def surroundings(backend: str, device: str) -> dict[str, Any]:
    """What a reader of a bug report asks first."""
    versions = {"python": platform.python_version()}
    for package in ("fused-slots", "torch", "triton", "numpy", "vllm", "vllm-ascend"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "backend": backend,
        "device": device,
        "host": host_half(),
        "rank": process_rank(),
        "pid": os.getpid(),
        "versions": versions,
    }
