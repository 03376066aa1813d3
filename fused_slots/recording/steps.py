"""One step of a recording: what was asked of the block tables, and what should stand in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fused_slots.groups import NULL_BLOCK_ID, KVCacheGroup
from fused_slots.recording.arrays import AnyIntArray, Int32Array, Int64Array

if TYPE_CHECKING:
    from fused_slots.row_operations import RowOperations


@dataclass(frozen=True)
class Append:
    """New blocks of one row, allocation block ids per group.

    They follow what the row holds; or they are all it holds (`overwrite`); or they follow the
    first `first_blocks[g]` blocks that it holds, as in `write_block_ids`. `cleared`: the row was
    given back before, as in `clear_row`.
    """

    req_index: int
    block_ids: tuple[list[int], ...]
    overwrite: bool
    first_blocks: tuple[int, ...] = ()
    cleared: bool = False

    def stage(self, tables: RowOperations) -> None:
        """Do it."""
        if self.cleared:
            tables.clear_row(self.req_index)
        if self.first_blocks:
            tables.write_block_ids(self.req_index, self.first_blocks, self.block_ids)
        else:
            overwrite = self.overwrite and not self.cleared
            tables.append_block_ids(self.req_index, self.block_ids, overwrite)

    def after(self, held: Sequence[list[int]] | None) -> list[list[int]]:
        """The blocks of its row behind it, per group, where the row held these; None = nothing."""
        held = [[] for _ in self.block_ids] if held is None else held
        return [
            [*old[: self.kept(g, old)], *new]
            for g, (old, new) in enumerate(zip(held, self.block_ids, strict=True))
        ]

    def kept(self, g: int, held: Sequence[int] | Int32Array) -> int:
        """Blocks of group `g` that stay of those that the row holds."""
        if self.overwrite or self.cleared:
            return 0
        return self.first_blocks[g] if self.first_blocks else len(held)


@dataclass(frozen=True, eq=False)
class Call:
    """How a manager was called, in the recording of one.

    Attributes:
        gathers, maps, drafts: what it did; neither: staged writes alone were applied. `drafts`
            are flat (row, position) pairs, each of which is a batch entry of the step.
        num_reqs_padded, num_tokens_padded: as passed.
        tables_out: gathered into tables of the caller's.
        slots_width: columns of the caller's slots; 0 = the manager's own.
        into_steps: drafts went into `slot_mappings` (v1 does so).
        has_computed: num_computed_tokens was given.
        replay_start, replay_len: int32 [B], where given.
        graph: a replay of a captured graph did it.
    """

    gathers: bool
    maps: bool
    drafts: bool
    num_reqs_padded: int
    num_tokens_padded: int
    tables_out: bool = False
    slots_width: int = 0
    into_steps: bool = False
    has_computed: bool = False
    replay_start: Int32Array | None = None
    replay_len: Int32Array | None = None
    graph: bool = False


@dataclass(frozen=True, eq=False)
class ScheduleStep:
    """What a runner does in one step (B batch entries, N tokens), and what its rows hold.

    Attributes:
        appends: in the order of the calls.
        request_ids: int32 [B]; small numbers, unique per request; -1 = no request.
        idx_mapping: int32 [B], the row of every entry; of a call int64 too, with anything in it.
        query_start_loc: int32 [B + 1].
        positions: int64 [N]; of a call more than N, or fewer, if it was called so.
        num_computed_tokens: int32 [max_num_reqs], by row; a row outside the batch keeps the value
            of the last step that scheduled it.
        expected_blocks: [group][entry], int32: all allocation block ids that the KV manager holds
            for the request, by column. 0 is the null block: freed, or never needed. Of a call:
            what the row was given.
        events: for reports, such as "preempted 3" or "prefix hit 512 of 7".
        call: how a manager was called, in the recording of one; None = a scheduler's step.
    """

    appends: tuple[Append, ...]
    request_ids: Int32Array
    idx_mapping: AnyIntArray
    query_start_loc: Int32Array
    positions: Int64Array
    num_computed_tokens: Int32Array
    expected_blocks: tuple[tuple[Int32Array, ...], ...]
    events: tuple[str, ...] = ()
    call: Call | None = None

    def above_windows(self, g: int, group: KVCacheGroup, num_ranks: int) -> list[Int32Array]:
        """Copies of each entry's blocks in group `g`, 0 in the columns that the call nulled."""
        blocks_of = [held.copy() for held in self.expected_blocks[g]]
        nulls = self.call is not None and self.call.has_computed and num_ranks == 1
        if nulls and group.sliding_window_reach:
            for row, held in zip(self.idx_mapping.tolist(), blocks_of, strict=True):
                if len(held):  # otherwise there may be no such row
                    first = int(self.num_computed_tokens[row]) - group.sliding_window_reach
                    held[: max(first, 0) // group.block_size] = NULL_BLOCK_ID
        return blocks_of
