"""The scalar oracle: one token at a time, in plain Python, as the formula is written.

It shares no code with any fast path and imports the types alone, so that it can be read as the
documentation of the mapping and trusted as the judge of every backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fused_slots.groups import PAD_SLOT_ID, ContextParallel, KVCacheGroup, SlotMappingMode

Row = Sequence[int]
Rows = Sequence[Row] | Mapping[int, Row]
"""The filled columns (kernel block ids) of every row of one group; a missing row is empty."""


class Outcome(Enum):
    """Why a token has the slot it has, in the order in which the rules apply."""

    STATE_GROUP = "the group holds state indices (mode NONE): tokens have no slots"
    DUMMY = "a dummy request (idx_mapping -1)"
    ROW_OUT_OF_RANGE = "fault: idx_mapping names a row that does not exist"
    NEGATIVE_POSITION = "the position is negative"
    REPLAYED = "a replayed token: shared blocks are not rewritten"
    EMPTY_RING = "fault: the ring's row holds no block"
    RING = "a slot of the ring"
    OTHER_RANK = "another context parallel rank owns the token"
    COLUMN_OUT_OF_ROW = "fault: the row has not filled the token's column"
    PAGED = "a slot of a paged block"
    NULL_BLOCK = "fault: the block is the null block, which is never written"


class MappedToken(NamedTuple):
    """One token's slot and the numbers on the way to it; -1 where the rules did not get so far.

    `virtual_block` is v, `virtual_offset` is w, `local_offset` counts tokens in this rank's
    part of the allocation block, `column` and `block_id` are the table's, `offset` counts in
    the kernel block.
    """

    slot: int
    outcome: Outcome
    virtual_block: int = -1
    virtual_offset: int = -1
    owner: int = -1
    local_offset: int = -1
    column: int = -1
    block_id: int = -1
    offset: int = -1


def map_token(
    group: KVCacheGroup,
    row: Row | None,
    position: int,
    context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
    replay_start: int = 0,
    replay_window: int = 0,
    replay_len: int | None = None,
    null_block_id: int | None = None,
) -> MappedToken:
    """Map one token of one live request in one group.

    Args:
        group: the token's KV cache group.
        row: the columns (kernel block ids) that the request has filled; None = no such row.
        position: the token's logical position in its request.
        context_parallel: size, rank and interleave.
        replay_start: first replayed position of the request; with `replay_window`, 0 = none.
        replay_window: replayed tokens from `replay_start` on.
        replay_len: replayed tokens of this request instead, <= 0 = none; None = replay_window.
        null_block_id: the allocation block that is never written; None = there is none.
    """
    if group.slot_mapping_mode is SlotMappingMode.NONE:
        return MappedToken(PAD_SLOT_ID, Outcome.STATE_GROUP)
    if row is None:
        return MappedToken(PAD_SLOT_ID, Outcome.ROW_OUT_OF_RANGE)
    if position < 0:
        return MappedToken(PAD_SLOT_ID, Outcome.NEGATIVE_POSITION)
    if replay_len is None:
        replay_len = replay_window if replay_start != 0 else 0
    if group.prefix_cacheable and replay_start <= position < replay_start + replay_len:
        return MappedToken(PAD_SLOT_ID, Outcome.REPLAYED)
    if group.circular:
        token = _map_ring(group, row, position)
    else:
        token = _map_paged(group, row, position, context_parallel)
    if null_block_id is not None and token.block_id // group.columns_per_block == null_block_id:
        return token._replace(slot=PAD_SLOT_ID, outcome=Outcome.NULL_BLOCK)
    return token


def _map_ring(group: KVCacheGroup, row: Row, position: int) -> MappedToken:
    if len(row) == 0:
        return MappedToken(PAD_SLOT_ID, Outcome.EMPTY_RING, column=0)
    block_id = int(row[0])
    offset = position % group.tokens_per_column
    slot = block_id * group.tokens_per_column + offset
    return MappedToken(slot, Outcome.RING, column=0, block_id=block_id, offset=offset)


def _map_paged(
    group: KVCacheGroup, row: Row, position: int, context_parallel: ContextParallel
) -> MappedToken:
    size, rank = (context_parallel.size, context_parallel.rank) if group.dcp_sharded else (1, 0)
    interleave = context_parallel.interleave
    virtual_block, virtual_offset = divmod(position, group.block_size * size)
    owner = (virtual_offset // interleave) % size
    if owner != rank:
        return MappedToken(PAD_SLOT_ID, Outcome.OTHER_RANK, virtual_block, virtual_offset, owner)
    stripe = virtual_offset // (size * interleave)
    local_offset = stripe * interleave + virtual_offset % interleave
    column = virtual_block * group.columns_per_block + local_offset // group.tokens_per_column
    numbers = (virtual_block, virtual_offset, owner, local_offset, column)
    if column >= len(row):
        return MappedToken(PAD_SLOT_ID, Outcome.COLUMN_OUT_OF_ROW, *numbers)
    block_id = int(row[column])
    offset = local_offset % group.tokens_per_column
    slot = block_id * group.tokens_per_column + offset
    return MappedToken(slot, Outcome.PAGED, *numbers, block_id, offset)


def slot_mappings(
    groups: Sequence[KVCacheGroup],
    rows: Sequence[Rows],
    idx_mapping: Sequence[int],
    query_start_loc: Sequence[int],
    positions: Sequence[int],
    capacity: int,
    context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
    replay_start: Sequence[int] | None = None,
    replay_window: int = 0,
    replay_len: Sequence[int] | None = None,
    null_block_id: int | None = None,
) -> list[list[int]]:
    """Slots of every token of a batch in every group, padded to the capacity.

    Args:
        groups: the G KV cache groups.
        rows: per group, the filled columns of each row (a sequence indexed by row, or a mapping).
        idx_mapping: the row of each batch entry; -1 = dummy.
        query_start_loc: token offsets of the batch entries; N = query_start_loc[num_reqs]. Tokens
            before its first entry belong to nobody.
        positions: logical position of each token; entries from N on are not read.
        capacity: width of the result; tokens beyond it are cut.
        context_parallel: size, rank and interleave.
        replay_start: per batch entry, the first replayed position, 0 = none; None = none at all.
        replay_window: replayed tokens.
        replay_len: per batch entry, replayed tokens instead; None = replay_window.
        null_block_id: the allocation block that is never written; None = there is none.

    Returns:
        G lists of `capacity` slots, PAD_SLOT_ID where nothing may be written.
    """
    slots = [[PAD_SLOT_ID] * capacity for _ in groups]
    for g, group in enumerate(groups):
        for batch_index, row_index in enumerate(idx_mapping):
            if row_index < 0:
                continue
            row = _row(rows[g], int(row_index))
            start = int(replay_start[batch_index]) if replay_start is not None else 0
            length = int(replay_len[batch_index]) if replay_len is not None else None
            begin, end = int(query_start_loc[batch_index]), int(query_start_loc[batch_index + 1])
            for token in range(begin, min(end, capacity)):
                slots[g][token] = map_token(
                    group,
                    row,
                    int(positions[token]),
                    context_parallel,
                    start,
                    replay_window,
                    length,
                    null_block_id,
                ).slot
    return slots


def gathered_row(
    group: KVCacheGroup,
    row: Row,
    width: int,
    num_computed_tokens: int | None = None,
    context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
) -> list[int]:
    """One gathered row: the filled columns, zero beyond them and below the sliding window.

    Args:
        group: the row's KV cache group.
        row: its filled columns.
        width: columns of the gathered table.
        num_computed_tokens: the request's computed tokens; None = no column is below the window.
        context_parallel: with size > 1 columns are not nulled.
    """
    below_window = 0
    if (
        num_computed_tokens is not None
        and group.sliding_window_reach
        and context_parallel.size == 1
    ):
        first_readable = max(num_computed_tokens - group.sliding_window_reach, 0)
        below_window = first_readable // group.tokens_per_column
    return [int(row[column]) if below_window <= column < len(row) else 0 for column in range(width)]


def _row(rows: Rows, index: int) -> Row | None:
    if isinstance(rows, Mapping):
        return rows.get(index, ())
    return rows[index] if index < len(rows) else None
