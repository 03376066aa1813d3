"""A manager whose writes and gather can wait for the slot mapping, so that a step is one launch.

vLLM's v2 runner applies staged writes, gathers, and maps slots in three calls. Between them
nothing on the device reads what they write, so the first two may wait for the third, or the first
for the second where the gather may not wait: two launches. They wait only inside `defer_writes`
and `fuse_gather`, which wrap the runner's own methods; whatever else is called while something
waits carries it out first, so each call sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import Fault
from fused_slots.host.rows import HostRows
from fused_slots.plan import WarmupReport

if TYPE_CHECKING:
    from fused_slots.inspect.explain import Explanation


class _Gather(NamedTuple):
    """A gather into the shared tables that has been asked for and not launched."""

    idx_mapping: torch.Tensor
    num_reqs_padded: int
    num_computed_tokens: torch.Tensor | None


class DeferringBlockTables(AscendBlockTables):
    """`AscendBlockTables` that may put off `apply_staged_writes` and `gather_block_tables`.

    Outside the two context managers nothing is put off.
    """

    _deferring = False
    _fusing = False
    _writes_wait = False
    """`apply_staged_writes` was called, and the device has not taken the writes yet."""
    _gather_waits: _Gather | None = None

    @contextmanager
    def defer_writes(self) -> Iterator[None]:
        """Let applied writes wait for the next call that needs them; at the end they are applied.

        Around the runner's `execute_model`, whose early returns never gather.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            self._settle()

    @contextmanager
    def fuse_gather(self) -> Iterator[None]:
        """Let a gather into the shared tables wait for the slot mapping of the same batch.

        Around the runner's `prepare_attn`.
        """
        self._fusing = True
        try:
            yield
        finally:
            self._fusing = False
            self._settle()

    def append_block_ids(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
    ) -> None:
        self._settle()
        super().append_block_ids(req_index, new_block_ids, overwrite)

    def apply_staged_writes(self) -> None:
        self._settle()
        if self._deferring and self._rows.pending:
            self._writes_wait = True
        else:
            super().apply_staged_writes()

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: Sequence[torch.Tensor] | None = None,
        out_ptrs: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if self._fusing and out is None and self._gather_waits is None:
            _, num_reqs_padded = self._check_gather(
                idx_mapping, num_reqs_padded, out, out_ptrs, num_computed_tokens
            )
            self._gather_waits = _Gather(idx_mapping, num_reqs_padded, num_computed_tokens)
            return self._gathered(num_reqs_padded)
        if self._gather_waits is not None:
            self._settle()
        gathered = super().gather_block_tables(
            idx_mapping, num_reqs_padded, out, out_ptrs, num_computed_tokens
        )
        self._settle()
        return gathered

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
        replay_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gather = self._gather_waits
        if gather is None or out is not None or not self._completes(gather, idx_mapping):
            self._settle()
            return super().compute_slot_mappings(
                idx_mapping, query_start_loc, positions, num_tokens_padded, out, replay_start
            )
        _, slots = super().step(
            idx_mapping,
            query_start_loc,
            positions,
            num_reqs_padded=gather.num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            num_computed_tokens=gather.num_computed_tokens,
            replay_start=replay_start,
        )
        self._gather_waits = None
        self._writes_wait = False
        return slots

    def step(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        replay_start: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        if self._gather_waits is not None:
            self._settle()
        result = super().step(
            idx_mapping,
            query_start_loc,
            positions,
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            num_computed_tokens=num_computed_tokens,
            replay_start=replay_start,
        )
        self._writes_wait = False
        return result

    def map_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._settle()
        return super().map_tokens(rows, positions, out)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        self._settle()
        return super().get_dummy_block_tables(num_reqs)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        self._settle()
        return super().get_dummy_slot_mappings(num_tokens)

    def init_block_table_layout_tensors(self) -> None:
        self._settle()
        super().init_block_table_layout_tensors()

    def warmup(self) -> WarmupReport:
        self._settle()
        return super().warmup()

    def take_faults(self) -> list[Fault]:
        self._settle()
        return super().take_faults()

    def explain(
        self, group: int, req_index: int, position: int, replay_start: int = 0
    ) -> Explanation:
        self._settle()
        return super().explain(group, req_index, position, replay_start)

    def check_integrity(self) -> None:
        self._settle()
        super().check_integrity()

    def _completes(self, gather: _Gather, idx_mapping: torch.Tensor) -> bool:
        """Whether one step does what waits and no more.

        A step applies all staged writes; those that were not applied must stay invisible.
        """
        return gather.idx_mapping is idx_mapping and self._writes_wait == self._rows.pending

    def _staged_for_gather(self) -> HostRows | None:
        """The waiting writes: a gather reads what they say, so one launch does both."""
        return self._staged("gather_block_tables") if self._writes_wait else None

    def _settle(self) -> None:
        """Launch what waits: a gather with the writes before it, or the writes alone."""
        gather, self._gather_waits = self._gather_waits, None
        try:
            if gather is not None:
                super().gather_block_tables(
                    gather.idx_mapping,
                    gather.num_reqs_padded,
                    num_computed_tokens=gather.num_computed_tokens,
                )
        finally:
            if self._writes_wait:
                super().apply_staged_writes()  # nothing, if the gather has taken them
                self._writes_wait = False
