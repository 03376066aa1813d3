"""What can be wrong with a manager's recorded calls, and what they did, counted token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fused_slots.groups import NULL_BLOCK_ID, ContextParallel
from fused_slots.recording.arrays import Int32Array, Int64Array, describe
from fused_slots.recording.check import Finding, FindingKind, at_two_columns, held_twice
from fused_slots.recording.oracles import FAULTS
from fused_slots.recording.schedule import Schedule
from fused_slots.recording.steps import Append, Call, ScheduleStep
from fused_slots.reference import Outcome, map_token


class Token(NamedTuple):
    """One token of a call, as the rules map it."""

    row: int
    position: int
    outcome: Outcome
    slot: int


class CallCheck:
    """Findings in the calls of a manager, in their order; iterate it once.

    - Tokens that the device padded as a fault (drafts and replays of graphs are counted alone:
      engines capture them over empty rows).
    - Slots, outside of rings and of block 0, that two tokens of one call write.
    - Blocks beyond their pool, where its size is known.
    - Blocks that two rows of a batch hold in a group that is not prefix-cacheable, or that stand in
      two columns of one that is, those below their windows apart.

    Args:
        schedule: a recording with `settings`.
        steps: its steps, where somebody watches them go by.

    Attributes:
        outcomes: per group, tokens by outcome.
        tokens: per group, what became of each token of the step that was checked last.
        copies: gathered rows by what changed in them since their entry was gathered last.
    """

    def __init__(self, schedule: Schedule, steps: Iterable[ScheduleStep] | None = None) -> None:
        assert schedule.settings is not None
        self._schedule, self._settings = schedule, schedule.settings
        self._steps = schedule if steps is None else steps
        self._ranks = ContextParallel(*self._settings["context_parallel"])
        self._entries: dict[tuple[int, int], tuple[int, int]] = {}
        self.outcomes: list[Counter[Outcome]] = [Counter() for _ in schedule.groups]
        self.copies: Counter[str] = Counter()
        self.tokens: list[list[Token]] = []
        self._rows: dict[tuple[int, int], tuple[Int32Array, Int64Array]] = {}

    def __iter__(self) -> Iterator[Finding]:
        for index, step in enumerate(self._steps):
            yield from self.of_step(index, step)

    def of_step(self, index: int, step: ScheduleStep) -> Iterator[Finding]:
        """The findings of the next step."""
        assert step.call is not None
        self.tokens = [[] for _ in self._schedule.groups]
        for append in step.appends:
            yield from self._check_pools(index, append)
        if step.call.gathers:
            self._count_copies(step, step.call)
            yield from self._check_holders(index, step, step.call)
        if step.call.maps or step.call.drafts:
            yield from self._check_tokens(index, step, step.call)

    def _check_pools(self, index: int, append: Append) -> Iterator[Finding]:
        groups, row = self._schedule.groups, append.req_index
        pools = self._settings.get("num_blocks") or [None] * len(groups)
        for g, (pool, blocks) in enumerate(zip(pools, append.block_ids, strict=True)):
            outside = [block for block in blocks if pool is not None and block >= pool]
            for block in outside[:1]:
                text = (
                    f"row {row} of {describe(groups, g)} is given block {block}"
                    f"{f' and {len(outside) - 1} more' * (len(outside) > 1)}, its pool has {pool}"
                )
                yield Finding(
                    *(FindingKind.OUT_OF_POOL, index, text), row=row, group=g, block=block
                )

    def _count_copies(self, step: ScheduleStep, call: Call) -> None:
        """Whole where another request stands in the entry, or its row was cut or started anew."""
        for g, blocks_of in enumerate(step.expected_blocks):
            for entry, (request, blocks) in enumerate(
                zip(step.request_ids.tolist(), blocks_of, strict=True)
            ):
                if call.tables_out:
                    self.copies["whole, into the caller's tables"] += 1
                    continue
                before = self._entries.get((g, entry), (-1, 0))
                self._entries[g, entry] = request, len(blocks)
                if before[0] != request or len(blocks) < before[1]:
                    self.copies["whole"] += 1
                else:
                    self.copies["new columns" if len(blocks) > before[1] else "nothing new"] += 1

    def _check_holders(self, index: int, step: ScheduleStep, call: Call) -> Iterator[Finding]:
        groups, null = self._schedule.groups, self._settings["null_block_id"]
        for g, group in enumerate(groups):
            held_now = step.above_windows(g, group, self._ranks.size)
            if null:
                held_now = [np.where(held == null, NULL_BLOCK_ID, held) for held in held_now]
            yield from held_twice(groups, index, g, step.idx_mapping, held_now)
            # Elsewhere a row may still list, unknown to us, what fell out of a window.
            if call.has_computed and self._ranks.size == 1:
                yield from at_two_columns(groups, index, g, step.idx_mapping, held_now)

    def _check_tokens(self, index: int, step: ScheduleStep, call: Call) -> Iterator[Finding]:
        schedule, starts = self._schedule, step.query_start_loc.tolist()
        positions = step.positions[: call.slots_width or schedule.max_num_batched_tokens].tolist()
        for g, group in enumerate(schedule.groups):
            writers: dict[int, int] = {}
            for entry, row in enumerate(step.idx_mapping.tolist()):
                columns = self._columns(g, row, step.expected_blocks[g][entry])
                faults: dict[Outcome, list[int]] = {}
                for position in positions[max(starts[entry], 0) : max(starts[entry + 1], 0)]:
                    outcome, slot = self._map(g, row, columns, position, entry, call)
                    self.outcomes[g][outcome] += 1
                    self.tokens[g].append(Token(row, position, outcome, slot))
                    if outcome in FAULTS:
                        faults.setdefault(outcome, []).append(position)
                    elif outcome is Outcome.PAGED and slot >= group.block_size:
                        other = writers.setdefault(slot, row)
                        if other != row:
                            text = (
                                f"slot {slot} of {describe(schedule.groups, g)} is written by row "
                                f"{row} (position {position}) and by row {other}"
                            )
                            block = slot // group.block_size
                            yield Finding(
                                *(FindingKind.WRITTEN_TWICE, index, text),
                                row=row,
                                group=g,
                                block=block,
                            )
                for outcome, at in faults.items() if not (call.drafts or call.graph) else ():
                    text = (
                        f"{outcome.name.lower().replace('_', ' ')} in "
                        f"{describe(schedule.groups, g)}: {len(at)} token{'s'[: len(at) > 1]} of "
                        f"row {row}, which holds {len(columns)} columns, the first at position "
                        f"{at[0]}"
                    )
                    yield Finding(FindingKind.FAULT, index, text, row=row, group=g)

    def _columns(self, g: int, row: int, blocks: Int32Array) -> Int64Array:
        """The columns of a row, which is the same array until it is written."""
        known = self._rows.get((g, row))
        if known is None or known[0] is not blocks:
            n = self._schedule.groups[g].columns_per_block
            columns = np.repeat(blocks.astype(np.int64), n) * n
            columns += np.arange(len(columns)) % n
            known = self._rows[g, row] = blocks, columns
        return known[1]

    def _map(
        self, g: int, row: int, columns: Int64Array, position: int, entry: int, call: Call
    ) -> tuple[Outcome, int]:
        group = self._schedule.groups[g]
        if row < 0:
            return (Outcome.DUMMY if group.maps_slots else Outcome.STATE_GROUP), -1
        replay: tuple[int, int, int | None] = (0, 0, None)
        if call.replay_start is not None:
            length = None if call.replay_len is None else int(call.replay_len[entry])
            replay = int(call.replay_start[entry]), self._settings["replay_window"], length
        known: Sequence[int] | None = None
        if row < self._schedule.max_num_reqs:
            known = columns  # type: ignore[assignment]  # indexed alone
        null = self._settings["null_block_id"]
        token = map_token(group, known, position, self._ranks, *replay, null)
        return token.outcome, token.slot
