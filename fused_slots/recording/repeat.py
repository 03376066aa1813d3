"""Recorded calls, repeated on a manager like the one that was recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fused_slots.base_tables import BaseTables
from fused_slots.block_tables import AscendBlockTables
from fused_slots.groups import ContextParallel
from fused_slots.recording.arrays import AnyIntArray
from fused_slots.recording.oracles import Batch
from fused_slots.recording.schedule import Schedule
from fused_slots.recording.steps import Call, ScheduleStep


class Results(NamedTuple):
    """What a call wrote: gathered tables (none = it did not gather) and slots ([0, 0] = none)."""

    tables: Sequence[torch.Tensor]
    slots: torch.Tensor


class _Repeated(AscendBlockTables):
    """A manager that is not recorded itself."""

    records_calls = False


def build_tables(
    schedule: Schedule, device: str, context_parallel: ContextParallel, replay_window: int
) -> AscendBlockTables:
    """A manager for a schedule, like the one that was recorded if it is one's."""
    sizes = {
        "max_num_reqs": schedule.max_num_reqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "context_parallel": context_parallel,
        "replay_window": replay_window,
    }
    settings = schedule.settings
    if settings is None:
        return _Repeated.from_groups(
            schedule.groups,
            device=device,
            num_blocks=schedule.num_blocks,
            **sizes,  # type: ignore[arg-type]
        )
    tables = _Repeated.__new__(_Repeated)
    tables._build(
        schedule.groups,
        settings["widths"],
        device,
        getattr(torch, settings["slot_dtype"]),
        schedule.num_blocks,
        False,
        settings["null_block_id"],
        **sizes,
    )
    return tables


def batch_of_call(step: ScheduleStep, call: Call, capacity: int) -> Batch:
    """A call's inputs, and how many of its tokens have room."""
    num_reqs = len(step.idx_mapping)
    room = min(call.slots_width or capacity, len(step.positions))
    starts = call.replay_start
    return Batch(
        step.idx_mapping,
        step.query_start_loc,
        step.positions,
        np.zeros(num_reqs, np.int32) if starts is None else starts,
        step.num_computed_tokens,
        num_reqs,
        min(int(step.query_start_loc[-1]), room),
        # Without starts nothing is replayed.
        np.zeros(num_reqs, np.int32) if starts is None else call.replay_len,
        call.has_computed,
    )


def repeat_call(tables: AscendBlockTables, call: Call, batch: Batch) -> Results:
    """Make a call whose row changes are staged; a caller's buffers begin as garbage.

    Raises:
        InvalidArgumentError: the host sees what a device counted as a fault.
    """

    def on_device(values: AnyIntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(tables.device)

    rows, positions = on_device(batch.idx_mapping), on_device(batch.positions)
    starts = on_device(batch.query_start_loc)
    computed = on_device(batch.num_computed_tokens) if call.has_computed else None
    replay_start, replay_len = (
        None if values is None else on_device(values)
        for values in (call.replay_start, call.replay_len)
    )
    out = _slots_out(tables, call)
    slots = tables.slot_mappings if out is None else out
    nothing = torch.empty(0, 0, dtype=torch.int64, device="cpu")
    if call.drafts:
        tables.map_tokens(rows, positions, out)
        return Results((), tables._backend.draft_slot_mappings if out is None else out)
    if call.gathers and call.maps:
        tables.step(
            *(rows, starts, positions),
            num_reqs_padded=call.num_reqs_padded,
            num_tokens_padded=call.num_tokens_padded,
            num_computed_tokens=computed,
            replay_start=replay_start,
            replay_len=replay_len,
        )
        return Results(tables.input_block_tables, slots)
    tables.apply_staged_writes()
    if call.gathers:
        return Results(_gather(tables, call, rows, computed), nothing)
    if call.maps:
        tables.compute_slot_mappings(
            *(rows, starts, positions, call.num_tokens_padded, out, replay_start, replay_len)
        )
        return Results((), slots)
    return Results((), nothing)


def _slots_out(tables: AscendBlockTables, call: Call) -> torch.Tensor | None:
    if call.into_steps:
        return tables.slot_mappings
    if not call.slots_width:
        return None
    shape = (tables.num_kv_cache_groups, call.slots_width)
    return torch.full(shape, 7, dtype=torch.int64, device=tables.device)


def _gather(
    tables: AscendBlockTables, call: Call, rows: torch.Tensor, computed: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    if not call.tables_out:
        tables.gather_block_tables(rows, call.num_reqs_padded, None, None, computed)
        return tables.input_block_tables
    size = max(call.num_reqs_padded, len(rows))
    out = [
        torch.full((size, width), 7, dtype=torch.int32, device=tables.device)
        for width in tables.layout.widths
    ]
    tables.gather_block_tables(rows, call.num_reqs_padded, out, None, computed)
    return [table[: call.num_reqs_padded] for table in out]


def state_digests(tables: BaseTables) -> dict[str, str]:
    """What a manager holds on its device, as sha256: the filled columns of its rows, and slots."""
    lengths = tables._backend.num_columns.cpu().numpy()
    rows = hashlib.sha256(np.ascontiguousarray(lengths).tobytes())
    for g, table in enumerate(tables._backend.tables):
        cells = table.cpu().numpy()
        rows.update(cells[np.arange(cells.shape[1]) < lengths[g][:, None]].tobytes())
    slots = tables.slot_mappings.cpu().numpy().astype(np.int64)
    return {"rows": rows.hexdigest(), "slots": hashlib.sha256(slots.tobytes()).hexdigest()}
