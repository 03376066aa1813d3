"""The derivation of one token's slot, number by number, for the person who doubts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fused_slots.arguments import check_count
from fused_slots.faults import INT32_MAX
from fused_slots.groups import GroupKind
from fused_slots.inspect.check import held_blocks, null_block
from fused_slots.reference import MappedToken, Outcome, map_token

if TYPE_CHECKING:
    from fused_slots.base_tables import BaseTables


@dataclass(frozen=True)
class Explanation:
    """Why one token has its slot; `str()` is the derivation, `lines` the same line by line."""

    slot: int
    outcome: Outcome
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(
    tables: BaseTables,
    group: int,
    req_index: int,
    position: int,
    replay_start: int = 0,
    replay_len: int | None = None,
) -> Explanation:
    """Derive the slot of one token from what the device's table holds now.

    Args:
        tables: the manager.
        group: KV cache group.
        req_index: the request's row; -1 = dummy, >= max_num_reqs = what the device would do.
        position: logical position.
        replay_start: first replayed position of the request.
        replay_len: replayed positions; None = the manager's replay_window.

    Raises:
        InvalidArgumentError: no such group, the row is below -1, or a number is no int.
    """
    layout = tables.layout
    check_count("group", group, 0, layout.num_groups - 1, "the last KV cache group")
    check_count("req_index", req_index, -1, INT32_MAX, "int32")
    position = check_count("position", position, -(2**63), 2**63 - 1, "int64")
    replay_start = check_count("replay_start", replay_start, -INT32_MAX - 1, INT32_MAX, "int32")
    if replay_len is not None:
        replay_len = check_count("replay_len", replay_len, -INT32_MAX - 1, INT32_MAX, "int32")
    row = _filled_columns(tables, group, req_index)
    token = (
        MappedToken(-1, Outcome.DUMMY)
        if req_index < 0 and layout.groups[group].maps_slots
        else map_token(
            layout.groups[group],
            row,
            position,
            layout.context_parallel,
            replay_start,
            layout.replay_window,
            replay_len,
            layout.null_block_id,
        )
    )
    lines = [
        f"{layout.describe(group)}, row {req_index}, position {position}",
        _sizes(tables, group),
        _row_line(tables, row),
        *_numbers(tables, group, req_index, position, token, replay_start, replay_len),
        f"slot = {token.slot}" + (" (PAD)" if token.slot < 0 else "") + f": {token.outcome.value}",
    ]
    return Explanation(token.slot, token.outcome, tuple(filter(None, lines)))


def _filled_columns(tables: BaseTables, group: int, req_index: int) -> list[int] | None:
    if not 0 <= req_index < tables.layout.max_num_reqs:
        return None
    filled = int(tables.num_blocks.gpu[group, req_index])
    columns: list[int] = tables.block_tables[group].gpu[req_index, :filled].tolist()
    return columns


def _sizes(tables: BaseTables, group: int) -> str:
    layout, kind = tables.layout, tables.layout.groups[group]
    if not kind.maps_slots:
        return f"  mode NONE, row width {layout.widths[group]}"
    if kind.kind is GroupKind.RING:
        return f"  circular: a ring of B = {kind.block_size} slots"
    size, rank = layout.shards(group)
    parts = [f"K = {kind.block_size}", f"B = {kind.tokens_per_column}"]
    parts.append(f"n = K/B = {kind.columns_per_block}")
    if size > 1:
        interleave = layout.context_parallel.interleave
        parts += [f"S' = {size}", f"c' = {rank}", f"I = {interleave}"]
    elif layout.context_parallel.size > 1:
        parts.append("replicated: S' = 1, c' = 0")
    return "  " + ", ".join(parts)


def _row_line(tables: BaseTables, row: list[int] | None) -> str:
    if row is None:
        return ""
    shown = ", ".join(map(str, row[:8])) + (", ..." if len(row) > 8 else "")
    return f"  the row has filled {len(row)} columns: [{shown}]"


def _numbers(
    tables: BaseTables,
    group: int,
    req_index: int,
    position: int,
    token: MappedToken,
    replay_start: int,
    replay_len: int | None,
) -> list[str]:
    layout, kind = tables.layout, tables.layout.groups[group]
    ring = token.outcome in (Outcome.RING, Outcome.EMPTY_RING)
    lines = []
    if token.outcome is Outcome.REPLAYED:
        end = replay_start + (layout.replay_window if replay_len is None else replay_len)
        lines.append(f"  replay window: {replay_start} <= {position} < {end}")
    if token.virtual_block >= 0:
        lines += _paged_numbers(tables, group, position, token)
    if token.block_id >= 0:
        where = 0 if ring else token.column
        size = kind.tokens_per_column
        lines += [
            f"  block id = table[row, {where}] = {token.block_id}",
            *_who_holds(tables, group, req_index, token.block_id // kind.columns_per_block),
            f"  slot = {token.block_id} * {size} + {token.offset} = {token.slot}",
        ]
    return lines


def _who_holds(tables: BaseTables, group: int, req_index: int, block: int) -> list[str]:
    """That a block is the null block, or which other live rows have it."""
    if block == null_block(tables):
        return [f"  block {block} is the null block, which no request owns"]
    rows, blocks = held_blocks(tables, group)
    others = sorted({*rows[blocks == block].tolist()} - {req_index})
    listed = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    return [f"  block {block} is shared with rows {listed}"] if others else []


def _paged_numbers(tables: BaseTables, group: int, position: int, token: MappedToken) -> list[str]:
    layout, kind = tables.layout, tables.layout.groups[group]
    size, _ = layout.shards(group)
    interleave = layout.context_parallel.interleave
    virtual_size = kind.block_size * size
    lines = [
        f"  v = {position} // {virtual_size} = {token.virtual_block}",
        f"  w = {position} mod {virtual_size} = {token.virtual_offset}",
    ]
    if size > 1:
        lines.append(
            f"  owner = ({token.virtual_offset} // {interleave}) mod {size} = {token.owner}"
        )
    if token.column >= 0:
        n, b = kind.columns_per_block, kind.tokens_per_column
        stripe = token.virtual_offset // (size * interleave)
        within = token.virtual_offset % interleave
        lines += [
            f"  local = {stripe} * {interleave} + {within} = {token.local_offset}",
            f"  col = {token.virtual_block} * {n} + {token.local_offset} // {b} = {token.column}",
        ]
    return lines
