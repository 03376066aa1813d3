"""Invariants of a manager that can be read off its buffers while it is at rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fused_slots.faults import IntegrityError

if TYPE_CHECKING:
    from fused_slots.base_tables import BaseTables

MAX_LISTED = 20


def check_integrity(tables: BaseTables) -> None:
    """Read every buffer back and check it; rows with staged writes are judged by the device's.

    Raises:
        IntegrityError: lists the broken invariants, at most 20 of them in full.
    """
    broken = [
        *_buffers_moved(tables),
        *_row_lengths(tables),
        *_row_contents(tables),
        *_aliased_slots(tables),
    ]
    if broken:
        listed = "; ".join(broken[:MAX_LISTED])
        more = f"; and {len(broken) - MAX_LISTED} more" if len(broken) > MAX_LISTED else ""
        raise IntegrityError("check_integrity", expected="no finding", actual=listed + more)


def _buffers_moved(tables: BaseTables) -> Iterator[str]:
    backend = tables._backend
    owned = [
        ("slot_mappings", tables.slot_mappings, backend.slot_mappings),
        ("num_blocks.gpu", tables.num_blocks.gpu, backend.num_columns),
    ]
    for g in range(tables.layout.num_groups):
        owned += [
            (f"block_tables[{g}].gpu", tables.block_tables[g].gpu, backend.tables[g]),
            (f"input_block_tables[{g}]", tables.input_block_tables[g], backend.input_tables[g]),
        ]
    for name, seen, own in owned:
        if seen.data_ptr() != own.data_ptr():
            yield f"{name} was replaced by another tensor; the kernels still use the first one"


def _row_lengths(tables: BaseTables) -> Iterator[str]:
    layout = tables.layout
    host, device = tables.num_blocks.np, tables.num_blocks.gpu.cpu().numpy()
    staged = tables._rows.staged_rows
    for g, width in enumerate(layout.widths):
        n = layout.groups[g].columns_per_block
        for row in np.flatnonzero((host[g] < 0) | (host[g] > width) | (host[g] % n != 0)).tolist():
            yield (
                f"num_blocks.np[{g}, {row}] = {host[g, row]} is not a multiple of {n} in "
                f"[0, {width}]"
            )
        for row in np.flatnonzero(host[g] != device[g]).tolist():
            if row not in staged:
                yield (
                    f"num_blocks[{g}, {row}] is {host[g, row]} on the host and "
                    f"{device[g, row]} on the device, with nothing staged"
                )


def _row_contents(tables: BaseTables) -> Iterator[str]:
    layout = tables.layout
    filled = tables.num_blocks.gpu.cpu().numpy()
    for g, group in enumerate(layout.groups):
        table = tables.block_tables[g].gpu.cpu().numpy()
        n = group.columns_per_block
        live = np.arange(layout.widths[g]) < filled[g][:, None]
        limit = (layout.max_block_ids[g] + 1) * n
        outside = live & ((table < 0) | (table >= limit))
        for row, column in np.argwhere(outside).tolist():
            yield (
                f"block_tables[{g}].gpu[{row}, {column}] = {table[row, column]} is no block of "
                f"{layout.describe(g)} (columns go from 0 to {limit - 1})"
            )
        if n > 1:
            within = np.arange(layout.widths[g]) % n
            first = np.repeat(table[:, ::n], n, axis=1)
            torn = live & ((first % n != 0) | (table != first + within)) & ~outside
            for row, column in np.argwhere(torn).tolist():
                yield (
                    f"block_tables[{g}].gpu[{row}, {column}] = {table[row, column]} is not part "
                    f"{column % n} of an allocation block split in {n}"
                )


def _aliased_slots(tables: BaseTables) -> Iterator[str]:
    """Two tokens of the last step on one slot; block 0 and rings apart."""
    slot_mappings = tables.slot_mappings.cpu().numpy()
    for g, group in enumerate(tables.layout.groups):
        if not group.kind.is_paged:
            continue
        tokens = np.flatnonzero(slot_mappings[g] >= group.block_size)
        slots, first, counts = np.unique(
            slot_mappings[g][tokens], return_index=True, return_counts=True
        )
        for place in np.flatnonzero(counts > 1).tolist():
            yield (
                f"slot {slots[place]} of {tables.layout.describe(g)} is written by "
                f"{counts[place]} tokens of the last step, the first is token "
                f"{tokens[first[place]]}"
            )
