"""What a manager consists of: rows on the host, buffers on the device, and the way to launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fused_slots import env
from fused_slots.backends.base import Backend, Step
from fused_slots.faults import ConfigurationError, InvalidArgumentError, require_int
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.threads import guard_threads

if TYPE_CHECKING:
    from fused_slots.recording.flight import FlightRecorder
    from fused_slots.stats import FaultTotals

CACHED_VIEWS = 64
"""Numbers of rows, and of tokens, for which views of the results are kept."""


@dataclass(frozen=True)
class BlockTable:
    """One group's source table: `gpu` is int32 [max_num_reqs, width] on the manager's device."""

    gpu: torch.Tensor


@dataclass(frozen=True)
class NumBlocks:
    """Filled columns per row, int32 [G, max_num_reqs].

    `np` is the host's truth, staged appends included, read-only; `gpu` is the device's copy, which
    follows when staged writes are applied.
    """

    np: npt.NDArray[np.int32]
    gpu: torch.Tensor


class BaseTables:
    """A manager's parts, what vLLM reads of its own class, and the two ways to launch."""

    layout: TableLayout
    _rows: HostRows
    _backend: Backend
    records_calls = True
    """Whether FUSED_SLOTS_RECORD is meant for this class."""

    def _assemble(
        self, layout: TableLayout, backend: type[Backend], device: torch.device, checked: bool
    ) -> None:
        """Allocate everything on the host and on the device.

        Raises:
            ConfigurationError: the sizes do not fit the memory.
        """
        self.layout = layout
        self._waiting = False
        """Whether something was put off that the next call must carry out (vllm/deferral.py)."""
        self._last_gather: Step | None = None
        """The last one, into whatever tables: its rows are those of live requests."""
        self._gathered_is_current = False
        """Whether the gathered tables hold what `_last_gather` wrote, and rows have not changed."""
        self.redirect_writes_to_null_block = False
        """Writable: while true, every staged block id becomes the null block (vLLM sets it)."""
        self.launches = 0
        """Operations started on the device since construction; graph replays do not count."""
        self._gathers = self._maps = 0
        """Of them those that gathered, and those that mapped tokens and nothing else."""
        self._fault_totals: FaultTotals | None = None
        with _naming_sizes(layout, device):
            self._rows = HostRows(layout)
            self._backend = backend(layout, device, checked)
        # As tensors name it: "cuda" holds them on "cuda:0", "cpu:0" on "cpu".
        self.device = self._backend.slot_mappings.device
        self.block_tables = [BlockTable(table) for table in self._backend.tables]
        self.input_block_tables = list(self._backend.input_tables)
        lengths = self._rows.num_columns.view()
        lengths.flags.writeable = False
        self.num_blocks = NumBlocks(lengths, self._backend.num_columns)
        self.slot_mappings = self._backend.slot_mappings
        # The first rows and columns; making the views anew costs 1 µs a group.
        kept = lru_cache(CACHED_VIEWS)
        self._gathered = kept(partial(_first_rows, self._backend.input_tables))
        self._mapped = kept(partial(_first_columns, self.slot_mappings))
        self.recorder: FlightRecorder | None = None
        """What keeps the last calls, if it was asked for (`start_recording`)."""
        num_calls = int(env.RECORD.read())
        if num_calls and self.records_calls:
            self.start_recording(num_calls)
        if env.NVTX.read() != "0" or env.METRICS.read() != "0":
            from fused_slots.observe import observe

            observe(self)  # type: ignore[arg-type]  # a part of every manager
        if checked:
            guard_threads(self)

    def __repr__(self) -> str:
        layout = self.layout
        groups = ", ".join(
            f"{group.name or g}: {group.kind.label}, {width} columns of {group.tokens_per_column}"
            for g, (group, width) in enumerate(zip(layout.groups, layout.widths, strict=True))
        )
        return (
            f"<{type(self).__name__}: {layout.num_groups} groups ({groups}), "
            f"{layout.max_num_reqs} rows, {layout.max_num_batched_tokens} tokens, "
            f"{self._backend.name} backend on {self.device}>"
        )

    def start_recording(self, num_calls: int) -> None:
        """Keep the manager's last calls from now on, for `save_recording`.

        FUSED_SLOTS_RECORD does so at construction. What each call was given on the device is
        copied there, behind it; nothing waits.

        Args:
            num_calls: launches to keep; a recording holds so many at least, once there were as
                many, and less than twice as many.

        Raises:
            ConfigurationError: num_calls is no positive int.
            InvalidArgumentError: recording has started already, or a graph is being captured.
        """
        from fused_slots.recording.flight import FlightRecorder

        num_calls = require_int("num_calls", num_calls, minimum=1)
        self._backend.refuse_capture("start_recording")
        if self.recorder is not None:
            raise InvalidArgumentError(
                "start_recording", expected="to be called once", actual="a second call"
            )
        self.recorder = FlightRecorder(self, num_calls)

    def save_recording(self, path: str | Path) -> Path:
        """Write the calls that were kept; waits for the device.

        The file is for `fused-slots check` and `fused-slots replay`. It begins with the rows as
        they were before the first call in it.

        Args:
            path: the file, `.npz.xz` by habit; its folder must exist.

        Raises:
            InvalidArgumentError: nothing is recorded, or a graph is being captured.
            OSError: the file cannot be written.
        """
        if self.recorder is None:
            raise InvalidArgumentError(
                "save_recording",
                expected="a manager that records",
                actual="one that does not",
                hint="Call start_recording first, or set FUSED_SLOTS_RECORD",
            )
        self._carry_out()
        return self.recorder.save(path)

    # What vLLM reads of its own class, under its names.

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per allocation block of every group."""
        return [group.block_size for group in self.layout.groups]

    @property
    def num_kv_cache_groups(self) -> int:
        """Number of KV cache groups (G)."""
        return self.layout.num_groups

    @property
    def max_num_reqs(self) -> int:
        """Rows of every table."""
        return self.layout.max_num_reqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step; the width of `slot_mappings`."""
        return self.layout.max_num_batched_tokens

    @property
    def cp_size(self) -> int:
        """Context parallel ranks."""
        return self.layout.context_parallel.size

    @property
    def cp_rank(self) -> int:
        """This context parallel rank."""
        return self.layout.context_parallel.rank

    @property
    def cp_interleave(self) -> int:
        """Consecutive tokens on one context parallel rank."""
        return self.layout.context_parallel.interleave

    def _carry_out(self) -> None:
        """Launch what was put off; every call but the launches themselves asks for it first."""

    def _launch(self, step: Step) -> None:
        """Apply, gather and map what `step` names; its staged writes are then the device's."""
        if self.layout.num_groups:
            self._backend.step(step)
            self.launches += 1
        if step.staged is not None:
            step.staged.clear()
            self._gathered_is_current = False
        if step.idx_mapping is not None:
            self._gathers += 1
            self._last_gather = step
            self._gathered_is_current = step.tables_out is None
            if self._rows.released:
                self._rows.released.clear()

    def _launch_map(self, step: Step) -> None:
        """Map the batch's tokens and nothing else."""
        if self.layout.num_groups:
            self._backend.map_slots(step)
            self.launches += 1
            self._maps += 1

    def _staged(self, operation: str) -> HostRows | None:
        """The rows if they have staged writes: those stay until the device has taken them.

        Raises:
            InvalidArgumentError: there are some, and a graph is being captured.
        """
        if not self._rows.pending:
            return None
        self._backend.refuse_capture(operation)
        return self._rows


def _first_rows(tables: tuple[torch.Tensor, ...], num_rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(table[:num_rows] for table in tables)


def _first_columns(slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return slots[:, :num_tokens]


@contextmanager
def _naming_sizes(layout: TableLayout, device: torch.device) -> Iterator[None]:
    """Turn a refused allocation into an error that names the sizes which asked for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("out of memory", "allocate memory", "Storage size")
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        raise ConfigurationError(
            f"max_num_reqs={layout.max_num_reqs}, "
            f"max_num_batched_tokens={layout.max_num_batched_tokens}, row widths {layout.widths}",
            expected=f"buffers that fit the memory of {device}",
            actual=f"{layout.num_bytes:,} bytes, which were refused",
            hint="Lower max_num_reqs, max_num_blocks or max_num_batched_tokens",
        ) from error
