"""Invariants of a manager that can be read off its buffers while it is at rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fused_slots.faults import IntegrityError
from fused_slots.groups import NULL_BLOCK_ID

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
        *_edited_cells(tables),
        *_aliased_slots(tables),
        *_null_slots(tables),
        *_shared_blocks(tables),
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
        for index in np.flatnonzero(counts > 1).tolist():
            yield (
                f"slot {slots[index]} of {tables.layout.describe(g)} is written by "
                f"{counts[index]} tokens of the last step, the first is token "
                f"{tokens[first[index]]}"
            )


def _null_slots(tables: BaseTables) -> Iterator[str]:
    """Tokens of the last step in a null block that is never written.

    Where the manager has none, vLLM's may be written, by as many tokens as redirect there.
    """
    null = tables.layout.null_block_id
    if null is None:
        return
    slot_mappings = tables.slot_mappings.cpu().numpy()
    for g, group in enumerate(tables.layout.groups):
        if group.kind.is_paged:
            written = np.flatnonzero(slot_mappings[g] // group.block_size == null)
            for token in written[:1].tolist():
                yield (
                    f"{len(written)} tokens of the last step are written to the null block "
                    f"({null}) of {tables.layout.describe(g)}, the first is token {token}"
                )


def _edited_cells(tables: BaseTables) -> Iterator[str]:
    """Gathered cells that are not what the last gather wrote: somebody else did."""
    step, backend = tables._last_gather, tables._backend
    if not tables._gathered_is_current or backend._captured_rows or step is None:
        return
    rows = live_rows(tables, repeated=True)
    for g, group in enumerate(tables.layout.groups):
        source = tables.block_tables[g].gpu.cpu().numpy()
        filled = tables.num_blocks.gpu[g].cpu().numpy()
        gathered = tables.input_block_tables[g].cpu().numpy()
        exists = rows >= 0
        expected = np.zeros_like(gathered)
        columns = np.arange(gathered.shape[1])
        expected[: len(rows)] = source[rows] * (columns < filled[rows][:, None]) * exists[:, None]
        wrong = gathered != expected
        if step.num_computed_tokens is not None and group.sliding_window_reach:
            wrong &= gathered != NULL_BLOCK_ID  # below the window
        for entry, column in np.argwhere(wrong).tolist():
            yield (
                f"input_block_tables[{g}][{entry}, {column}] is {gathered[entry, column]}, the "
                f"gather wrote {expected[entry, column]}: who writes into gathered tables calls "
                "invalidate_gathered"
            )


def _shared_blocks(tables: BaseTables) -> Iterator[str]:
    """Blocks of two live rows in a group that shares none, or of two groups of one pool."""
    layout = tables.layout
    pools: dict[str, dict[int, int]] = {}
    for g, group in enumerate(layout.groups):
        rows, blocks = held_blocks(tables, g)
        if not group.prefix_cacheable:
            pairs = np.unique(np.stack([blocks, rows], axis=1), axis=0)
            for index in np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0]).tolist():
                block, row = pairs[index].tolist()
                yield (
                    f"block {block} of {layout.describe(g)}, which shares none, is held by row "
                    f"{row} and by row {pairs[index + 1, 1]}"
                )
        owners = pools.setdefault(group.pool, {}) if group.pool else {}
        for block in np.unique(blocks).tolist():
            other = owners.setdefault(block, g)
            if other != g:
                yield (
                    f"block {block} of pool {group.pool!r} is held in {layout.describe(other)} "
                    f"and in {layout.describe(g)}"
                )


def null_block(tables: BaseTables) -> int:
    """The block that is never written: the manager's, or the one that vLLM never hands out."""
    null = tables.layout.null_block_id
    return NULL_BLOCK_ID if null is None else null


def live_rows(tables: BaseTables, *, repeated: bool = False) -> npt.NDArray[np.int64]:
    """Rows of the last gather or step that were not given back since, each once.

    Args:
        tables: the manager.
        repeated: as they were gathered instead: all, in that order, -1 where there is no row.
    """
    step = tables._last_gather
    if step is None or step.idx_mapping is None:
        return np.zeros(0, dtype=np.int64)
    rows = step.idx_mapping.cpu().numpy().astype(np.int64)
    exists = (rows >= 0) & (rows < tables.layout.max_num_reqs)
    if repeated:
        return np.where(exists, rows, -1)
    return np.array(sorted({*rows[exists].tolist()} - tables._rows.released), dtype=np.int64)


def held_blocks(tables: BaseTables, g: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and allocation block of all that live rows hold in a group, the null block apart.

    Blocks below the sliding window are their rows' no more: an engine hands them out again.
    """
    group = tables.layout.groups[g]
    n = group.columns_per_block
    live = live_rows(tables)
    filled = tables.num_blocks.gpu[g].cpu().numpy()[live]
    firsts = tables.block_tables[g].gpu.cpu().numpy()[live, ::n].astype(np.int64)
    columns = np.arange(firsts.shape[1]) * n
    held = columns < filled[:, None]
    step, reach = tables._last_gather, group.sliding_window_reach
    whole = not reach or tables.cp_size > 1
    if not whole and step is not None and step.num_computed_tokens is not None:
        below = (step.num_computed_tokens.cpu().numpy()[live] - reach) // group.block_size
        held &= columns >= below[:, None] * n
    blocks = firsts // n
    held &= (blocks != NULL_BLOCK_ID) & (blocks != null_block(tables))
    return np.broadcast_to(live[:, None], held.shape)[held], blocks[held]
