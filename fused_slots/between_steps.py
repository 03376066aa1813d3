"""What is called between steps: dummy runs, warm-up, plans, faults, derivations, invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fused_slots.arguments import check_count
from fused_slots.base_tables import BaseTables
from fused_slots.faults import Fault
from fused_slots.groups import PAD_SLOT_ID
from fused_slots.plan import LaunchPlan, WarmupReport
from fused_slots.stats import FaultTotals, Stats

if TYPE_CHECKING:
    from fused_slots.inspect.explain import Explanation


class BetweenSteps(BaseTables):
    """The calls that prepare a manager or look at it; none of them is part of a step."""

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Zeroed gathered tables for a dummy run; the caller may write into them.

        Args:
            num_reqs: rows to return.

        Returns:
            Per group an int32 [num_reqs, width] view of `input_block_tables`.

        Raises:
            InvalidArgumentError: more rows than max_num_reqs.
        """
        num_reqs = check_count("num_reqs", num_reqs, 0, self.layout.max_num_reqs, "max_num_reqs")
        self._carry_out()
        self._gathered_is_current = False
        self._backend.clear_input_tables(num_reqs)
        return self._gathered(num_reqs)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """The slot mappings, PAD everywhere, for a dummy run.

        Args:
            num_tokens: columns to return.

        Returns:
            [G, num_tokens] view of `slot_mappings`, whose whole buffer is PAD.

        Raises:
            InvalidArgumentError: more tokens than max_num_batched_tokens.
        """
        capacity = self.layout.max_num_batched_tokens
        num_tokens = check_count("num_tokens", num_tokens, 0, capacity, "max_num_batched_tokens")
        self._carry_out()
        self.slot_mappings.fill_(PAD_SLOT_ID)
        return self._mapped(num_tokens)

    def invalidate_gathered(self) -> None:
        """Make the next gather write `input_block_tables` whole.

        For a caller who has written into them; without `out` a gather writes only what changed.
        """
        self._carry_out()
        self._gathered_is_current = False
        self._backend.invalidate_gathered()

    def init_block_table_layout_tensors(self) -> None:
        """Rebuild all that the host knows on the device, after its memory was lost.

        Harmless at any time. What the tables held is lost until rows are overwritten: their slots
        may be anything, but nothing outside the manager's memory is touched. Fault counts are
        zero afterwards.
        """
        self._carry_out()
        self._gathered_is_current, self._last_gather = False, None
        self._backend.restore(self._rows)
        self._rows.forget_device()

    def warmup(self) -> WarmupReport:
        """Compile every kernel variant that a plan can choose, so that no step compiles any."""
        self._carry_out()
        return self._backend.warmup()

    def launch_plan(
        self, num_reqs: int, num_tokens: int, max_query_len: int | None = None
    ) -> LaunchPlan:
        """How a batch of these sizes would be launched.

        Args:
            num_reqs: batch entries.
            num_tokens: tokens of the batch.
            max_query_len: longest query, if known.

        Raises:
            InvalidArgumentError: a size exceeds the manager's.
        """
        num_reqs = check_count("num_reqs", num_reqs, 0, self.layout.max_num_reqs, "max_num_reqs")
        capacity = self.layout.max_num_batched_tokens
        num_tokens = check_count("num_tokens", num_tokens, 0, capacity, "max_num_batched_tokens")
        if max_query_len is not None:
            max_query_len = check_count(
                "max_query_len", max_query_len, 0, capacity, "max_num_batched_tokens"
            )
        return self._backend.launch_plan(num_reqs, num_tokens, max_query_len)

    def take_faults(self) -> list[Fault]:
        """Wait for the device and return the faults counted since the last call.

        Unchecked: one record per (code, group). Checked: the first ones one by one, then one
        record per (code, group) for the rest.
        """
        self._carry_out()
        faults = self._backend.take_faults()
        self._totals().take(faults)
        return self._named(faults)

    def stats(self) -> Stats:
        """What the manager has done so far; neither waits for the device nor launches anything.

        Faults are those that the device had counted by now, which is a step or two late where
        launches are in flight: the counters are copied beside the device's work, and only that
        copy is waited for.
        """
        sent = self._backend.sent()
        return Stats(
            steps=self._gathers or self._maps,
            launches=self.launches,
            appends=self._rows.num_calls,
            rows=int(np.count_nonzero(self.num_blocks.np.any(axis=0))),
            packets=sent.packets,
            bytes_staged=sent.bytes,
            ring_waits=sent.waits,
            faults=tuple(self._named(self._totals().read())),
        )

    def _totals(self) -> FaultTotals:
        if self._fault_totals is None:
            self._fault_totals = FaultTotals(self)
        return self._fault_totals

    def _named(self, faults: list[Fault]) -> list[Fault]:
        groups = self.layout.groups
        return [replace(fault, group_name=groups[fault.group].name) for fault in faults]

    def explain(
        self,
        group: int,
        req_index: int,
        position: int,
        replay_start: int = 0,
        replay_len: int | None = None,
    ) -> Explanation:
        """Derive one token's slot, number by number; str() of the result is the derivation.

        Reads the row from the device, so it waits for it. Staged writes that were not applied are
        not seen.

        Args:
            group: KV cache group.
            req_index: the request's row, -1 = dummy.
            position: logical position of the token.
            replay_start: first replayed position of the request.
            replay_len: replayed positions, <= 0 = none; None = the manager's replay_window, and
                then a replay_start of 0 = none.

        Raises:
            InvalidArgumentError: no such group or row.
        """
        self._carry_out()
        from fused_slots.inspect.explain import explain

        return explain(self, group, req_index, position, replay_start, replay_len)

    def check_integrity(self) -> None:
        """Check every invariant that can be read off the buffers; waits for the device.

        Raises:
            IntegrityError: lists each broken invariant.
        """
        self._carry_out()
        from fused_slots.inspect.check import check_integrity

        check_integrity(self)
