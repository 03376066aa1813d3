"""What a device must offer to hold block tables and map slots.

A backend owns the device's buffers of one manager, for its whole life at fixed addresses, and runs
the manager's operations on them in the order they are called. The manager has checked every
argument that the host can see; what it cannot see (contents of device tensors) the backend makes
safe and counts as a fault.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.faults import Fault, InvalidArgumentError
from fused_slots.groups import PAD_SLOT_ID
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import LaunchPlan, WarmupReport


class Step(NamedTuple):
    """One call's checked arguments on their way to the backend; what is None is not done.

    Staged writes are applied if `staged` is given, rows are gathered if `idx_mapping` is, and
    tokens are mapped if `query_start_loc` is.

    Attributes:
        idx_mapping: int32 or int64 [num_reqs], the row of each batch entry.
        query_start_loc: int32 [>= num_reqs + 1], token offsets.
        positions: int64 [>= N], given with query_start_loc.
        num_reqs_padded: gathered rows that the caller reads.
        num_tokens_padded: tokens that the caller expects, for the launch plan; as many are mapped
            as query_start_loc says.
        num_computed_tokens: int32 [max_num_reqs], by row; None = no column is nulled.
        replay_start: int32 [>= num_reqs], by batch entry; None = no token is replayed.
        replay_len: int32 [>= num_reqs], by batch entry, given with replay_start; None = the
            manager's replay_window.
        staged: the rows with staged writes.
        tables_out: per group the caller's table; None = the gathered tables.
        slots_out: the caller's slots; None = slot_mappings.
    """

    idx_mapping: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    num_reqs_padded: int = 0
    num_tokens_padded: int = 0
    num_computed_tokens: torch.Tensor | None = None
    replay_start: torch.Tensor | None = None
    replay_len: torch.Tensor | None = None
    staged: HostRows | None = None
    tables_out: Sequence[torch.Tensor] | None = None
    slots_out: torch.Tensor | None = None


class Sent(NamedTuple):
    """Packets of staged writes that went to the device, their bytes, and how often that waited."""

    packets: int
    bytes: int
    waits: int


class FaultReader(Protocol):
    """Fault counters, int64 [codes + 1, G], as far as the device has come."""

    def start(self) -> None:
        """Begin to read them."""

    def arrived(self) -> bool:
        """Whether what was begun is done."""

    def read(self) -> npt.NDArray[np.int64]:
        """What was read, to keep; waits for the reading alone."""


class HostFaults:
    """Counters in host memory."""

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        self._counts = counts

    def start(self) -> None:
        """Nothing: they are there."""

    def arrived(self) -> bool:
        return True

    def read(self) -> npt.NDArray[np.int64]:
        return np.array(self._counts)


class Backend(ABC):
    """Memory and operations of one manager on one device.

    Attributes:
        tables: per group int32 [max_num_reqs, width], the source rows, views of one arena.
        input_tables: per group int32 [max_num_reqs, width], the gathered rows, likewise.
        num_columns: int32 [G, max_num_reqs], filled columns as the device sees them.
        slot_mappings: slot_dtype [G, max_num_batched_tokens].
        draft_slot_mappings: the same shape, for `map_tokens`.
    """

    name: ClassVar[str]
    default_slot_dtype: ClassVar[torch.dtype] = torch.int64
    plans: ClassVar[tuple[str, ...]] = ("auto",)
    """Values of FUSED_SLOTS_PLAN that it can follow."""
    reads_tensors_on_host: ClassVar[bool] = False
    """Whether the host can look into device tensors without waiting, so that calls check them."""

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        self.check_layout(layout)
        self.layout = layout
        self.device = device
        self.checked = checked
        self.warms_replay = True
        """Writable: whether `warmup` compiles for replayed tokens; an engine may have none."""
        self._dirty_rows = 0
        """Gathered rows, from the first on, that may hold something."""
        self._captured_rows = 0
        """Gathered rows that a graph may fill at any time."""
        num_groups, num_rows = layout.num_groups, layout.max_num_reqs
        self.arena = self.allocate((layout.arena_size,), torch.int32, 0)
        self.input_arena = self.allocate((layout.arena_size,), torch.int32, 0)
        self.tables = self.table_views(self.arena)
        self.input_tables = self.table_views(self.input_arena)
        self.num_columns = self.allocate((num_groups, num_rows), torch.int32, 0)
        slots = (num_groups, layout.max_num_batched_tokens)
        self.slot_mappings = self.allocate(slots, layout.slot_dtype, PAD_SLOT_ID)
        self.draft_slot_mappings = self.allocate(slots, layout.slot_dtype, PAD_SLOT_ID)
        self.table_storages = _storages(self.arena, self.input_arena, self.num_columns)
        """Addresses of the memory that only the backend writes."""
        self.slot_storages = _storages(self.slot_mappings, self.draft_slot_mappings)

    def check_layout(self, layout: TableLayout) -> None:  # noqa: B027 - all are, in int64
        """Refuse sizes with which this device's arithmetic would not be exact.

        Raises:
            ConfigurationError: names the group and the numbers.
        """

    @torch.inference_mode(False)  # a tensor that is made in inference mode is written there alone
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> torch.Tensor:
        """A device tensor filled with `fill`, at one address for the manager's life."""
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    @abstractmethod
    def step(self, step: Step) -> None:
        """Apply, gather and map, whichever of them `step` names, in one launch."""

    @abstractmethod
    def map_slots(self, step: Step) -> None:
        """Map every token of the batch in every group and pad the rest, in one launch.

        Nothing else: it may be captured into a graph, and `idx_mapping` is not gathered.
        """

    @abstractmethod
    def map_tokens(self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Map flat (row, position) pairs in every group and pad the rest, in one launch."""

    @abstractmethod
    def clear_input_tables(self, num_reqs: int) -> None:
        """Zero the gathered rows; the caller then writes into the first `num_reqs` of them."""

    @abstractmethod
    def take_faults(self) -> list[Fault]:
        """Wait for the device, return the faults counted since the last call, and forget them."""

    @abstractmethod
    def sent(self) -> Sent:
        """What staged writes have cost so far."""

    @abstractmethod
    def fault_reader(self) -> FaultReader:
        """A way to look at the fault counters without waiting for launches."""

    @abstractmethod
    def launch_plan(self, num_reqs: int, num_tokens: int, max_query_len: int | None) -> LaunchPlan:
        """How a batch of these sizes would be launched."""

    @abstractmethod
    def warmup(self) -> WarmupReport:
        """Compile every variant that a plan can choose."""

    @abstractmethod
    def try_launch(self) -> None:
        """Launch one kernel on nothing, if the device has kernels; for when `warmup` is skipped.

        Raises:
            BackendUnavailableError: kernels cannot be launched here.
        """

    @abstractmethod
    def forget_gathered(self) -> None:
        """Make the next gather write every column of the rows that may hold something."""

    def invalidate_gathered(self) -> None:
        """Make the next gather write every column of every row."""
        self._dirty_rows = self.layout.max_num_reqs
        self.forget_gathered()

    def restore(self, rows: HostRows) -> None:
        """Write all that the host knows again, after device memory came back with anything in it.

        Afterwards no kernel follows what the memory held, and rows that are overwritten are as
        in a new manager.
        """
        lengths, staged = rows.num_columns.copy(), rows.collect()
        lengths[:, staged.rows] = staged.starts.clip(min=0).T  # nothing is written behind them
        self.num_columns.copy_(torch.from_numpy(lengths))
        for g, group in enumerate(self.layout.groups):
            if not group.kind.maps_slots:  # kernels read these tables by row, past a row's end too
                columns = torch.arange(self.layout.widths[g], device=self.device)
                past_end = columns >= self.num_columns[g].unsqueeze(1)
                self.tables[g].masked_fill_(past_end, 0)
        self.invalidate_gathered()

    def is_capturing(self) -> bool:
        """Whether the calling stream is being captured into a graph."""
        return False

    def refuse_capture(self, operation: str) -> None:
        """Refuse what may not be in a graph.

        Raises:
            InvalidArgumentError: the calling stream is being captured into one.
        """
        if self.is_capturing():
            raise InvalidArgumentError(
                operation,
                expected="no graph capture on this stream",
                actual="a capture in progress",
                hint="Apply staged writes and call warmup() before the capture; graphs may hold "
                "compute_slot_mappings and map_tokens",
            )

    def table_views(self, arena: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each group's table in an arena."""
        rows = self.layout.max_num_reqs
        return tuple(
            arena[offset : offset + rows * width].view(rows, width)
            for offset, width in zip(self.layout.offsets, self.layout.widths, strict=False)
        )


def _storages(*tensors: torch.Tensor) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
