"""A manager whose writes and gather can wait for the slot mapping, so that a step is one launch.

vLLM's v2 runner applies staged writes, gathers, and maps slots in three calls. Between them
nothing on the device reads what they write, so the first two may wait for the third, or the first
for the second where the gather may not wait: two launches. They wait only inside `defer_writes`
and `fuse_gather`, which wrap the runner's own methods; whatever else is called while something
waits carries it out first, so each call sees what it would have seen.

One thing differs: a gather that waits reads `idx_mapping` when it is launched. Who writes other
rows into that tensor between the two calls gets those in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fused_slots.backends.base import Step
from fused_slots.block_tables import AscendBlockTables


class DeferringBlockTables(AscendBlockTables):
    """`AscendBlockTables` that may put off `apply_staged_writes` and `gather_block_tables`.

    Outside the two context managers nothing is put off.
    """

    _deferring = False
    _fusing = False
    _writes_wait = False
    """`apply_staged_writes` was called, and the device has not taken the writes yet."""
    _gather_waits: Step | None = None
    """A gather into the gathered tables that was called, checked and not launched."""

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
            self._carry_out()

    @contextmanager
    def fuse_gather(self) -> Iterator[None]:
        """Let a gather into the gathered tables wait for the slot mapping of the same batch.

        Around the runner's `prepare_attn`.
        """
        self._fusing = True
        try:
            yield
        finally:
            self._fusing = False
            self._carry_out()

    def _launch(self, step: Step) -> None:
        gathers, maps = step.idx_mapping is not None, step.query_start_loc is not None
        if self._gather_waits is not None:
            self._carry_out()
            step = step._replace(staged=self._rows if step.staged and self._rows.pending else None)
        if not gathers and self._deferring:
            self._writes_wait = self._waiting = True
        elif gathers and not maps and step.tables_out is None and self._fusing:
            self._gather_waits, self._waiting = step, True
        else:
            self._launch_with_writes(step)

    def _launch_map(self, step: Step) -> None:
        gather = self._gather_waits
        if (
            gather is None
            or step.slots_out is not None
            or step.idx_mapping is not gather.idx_mapping
        ):
            self._carry_out()
            super()._launch_map(step)
            return
        self._launch_with_writes(
            step._replace(
                num_reqs_padded=gather.num_reqs_padded,
                num_computed_tokens=gather.num_computed_tokens,
            )
        )
        self._gather_waits = None

    def _launch_with_writes(self, step: Step) -> None:
        """Launch `step`, and the writes that wait in the same launch: it reads what they say."""
        if self._writes_wait:
            step = step._replace(staged=self._staged("gather_block_tables"))
        super()._launch(step)
        self._writes_wait = False

    def _carry_out(self) -> None:
        """Launch what waits: a gather with the writes before it, or the writes alone."""
        gather, self._gather_waits = self._gather_waits, None
        try:
            if gather is not None:
                self._launch_with_writes(gather)
        finally:
            if self._writes_wait:
                self._launch_with_writes(Step())
            self._waiting = False
