"""What backends of GPUs and NPUs share: memory, dirty rows, faults, callers' tables, capturing.

A device runs a manager's operations as launches of compiled kernels. `map_slots` and `map_tokens`
are launches that graphs may capture; everything that writes or gathers tables, alone or together,
is one launch of a step kernel. Which kernels these are, and how work is dealt to their programs,
a subclass knows (gpu.py, ascend_operations.py); memory, streams and the launcher come from one
file for each device below it.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.backends.base import Backend, FaultReader, HostFaults, Sent
from fused_slots.backends.descriptor import (
    check_int32_positions,
    descriptor_lines,
    is_power_of_two,
    position_divisors,
)
from fused_slots.backends.launch import Launch, Launcher, Variant
from fused_slots.backends.pinned import FaultsAside
from fused_slots.faults import Fault, FaultCode, fault_records
from fused_slots.groups import GroupKind
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import WarmupReport

KEPT_OUT_TABLES = 64
"""Sets of callers' tables whose addresses are kept on the device."""

INDEX_DTYPES = (torch.int32, torch.int64)
"""Of idx_mapping and of drafts' rows, and of slots in a caller's buffer."""

T = TypeVar("T")
Fill = Callable[[npt.NDArray[np.int32]], T]
"""Writes a packet of staged writes into an array that is at least as long."""


class Uploads(Protocol):
    """The way of packets of staged writes to the device."""

    @property
    def sent(self) -> Sent:
        """What went this way so far."""

    def upload(self, size: int, fill: Fill[T]) -> tuple[torch.Tensor, T]:
        """Make a packet readable by the next launch, in stream order.

        Args:
            size: int32 elements of the packet.
            fill: writes it into an array at least as long.

        Returns:
            The packet on the device, at least as long, and what `fill` returned.
        """

    def mark_used(self) -> None:
        """The launch that reads the packet uploaded last is enqueued."""


class DeviceBackend(Backend):
    """The operations as kernel launches, as far as no kernel is concerned."""

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, device, checked)
        self.allocate_lines()
        # For arguments that a launch does not read, or reads as "none" in every row.
        self._nothing = self.allocate((layout.max_num_reqs,), torch.int32, -1)
        self._powers_of_two = all(is_power_of_two(size) for size in position_divisors(layout))
        self._sharded = layout.context_parallel.size > 1
        self._has_ring = any(group.kind is GroupKind.RING for group in layout.groups)
        self._launches: dict[Variant, Launch] = {}
        self._out_tables: dict[tuple[int, ...], torch.Tensor] = {}
        # Those that a graph reads whenever it is replayed, so they are kept for good.
        self._captured_out_tables: dict[tuple[int, ...], torch.Tensor] = {}
        self.launcher = self.make_launcher()

    def check_layout(self, layout: TableLayout) -> None:
        check_int32_positions(layout)

    def allocate_lines(self) -> None:
        """What kernels know of each group, and the fault counters [codes + 1, G]."""
        lines = descriptor_lines(self.layout)
        self._descriptor = self.allocate(tuple(lines.shape), torch.int32, 0)
        self._descriptor.copy_(lines)
        self._faults = self.allocate((len(FaultCode) + 1, len(lines)), torch.int64, 0)

    @abstractmethod
    def make_launcher(self) -> Launcher:
        """The launcher of this device."""

    @abstractmethod
    def make_uploads(self) -> Uploads:
        """The way of packets to this device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all launches."""

    @abstractmethod
    def variants(self) -> Iterator[Variant]:
        """Every variant that a call can choose."""

    @abstractmethod
    def _bind(self, variant: Variant) -> Launch:
        """Compile a variant and bind it to the tensors that never move."""

    @cached_property
    def uploads(self) -> Uploads:
        """The way of packets; v1 tables, whose rows go out otherwise, have none."""
        return self.make_uploads()

    def restore(self, rows: HostRows) -> None:
        super().restore(rows)
        self._descriptor.copy_(descriptor_lines(self.layout))
        self._nothing.fill_(-1)
        self._faults.zero_()
        for numbers, tensor in self._out_tables.items():
            tensor.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def clear_input_tables(self, num_reqs: int) -> None:
        self.zero_dirty_rows(num_reqs)
        # The caller may write into the rows it got.
        self.forget_gathered()

    def entries_to_gather(self, num_reqs: int, num_reqs_padded: int) -> int:
        """Rows of the own gathered tables that a gather must bring up to date: those that are
        asked for, that an earlier gather filled, or that a replay may fill at any time."""
        num_entries = max(num_reqs_padded, self._dirty_rows, self._captured_rows)
        if self.is_capturing():
            # Nothing runs now, so what is dirty stays so.
            self._captured_rows = max(self._captured_rows, num_reqs)
        else:
            self._dirty_rows = num_reqs
        return num_entries

    def zero_dirty_rows(self, num_reqs: int) -> None:
        """Zero what a gather or a replay may have filled; the first `num_reqs` become dirty."""
        for table in self.input_tables:
            table[: max(num_reqs, self._dirty_rows, self._captured_rows)].zero_()
        self._dirty_rows = num_reqs

    def take_faults(self) -> list[Fault]:
        self.synchronize()
        counts = self._faults.to("cpu", torch.int64, copy=True).numpy()
        self._faults.zero_()
        return fault_records(counts, self.take_fault_details())

    def sent(self) -> Sent:
        return self.uploads.sent if "uploads" in vars(self) else Sent(0, 0, 0)

    def fault_reader(self) -> FaultReader:
        if self.device.type == "cpu":
            return HostFaults(self._faults.numpy())
        return FaultsAside(self._faults)

    def take_fault_details(self) -> list[Fault]:
        """The faults that were recorded one by one, which are then forgotten."""
        return []

    def kept_on_device(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """Numbers about callers' tables as int64 on the device; those a graph reads for good."""
        if numbers not in self._out_tables:
            self.refuse_capture("the first gather into these out tables")
            if len(self._out_tables) >= KEPT_OUT_TABLES:
                self._out_tables = dict(self._captured_out_tables)
            kept = self._out_tables[numbers] = self.allocate((len(numbers),), torch.int64, 0)
            kept.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        if self.is_capturing():
            self._captured_out_tables[numbers] = self._out_tables[numbers]
        return self._out_tables[numbers]

    def warmup(self) -> WarmupReport:
        begin = time.perf_counter()
        variants = list(self.variants())
        for variant in variants:
            self._bound(variant)
        self.synchronize()
        return WarmupReport(list(map(str, variants)), time.perf_counter() - begin)

    def try_launch(self) -> None:
        self._bound(next(self.variants()))
        self.synchronize()

    def _bound(self, variant: Variant) -> Launch:
        launch = self._launches.get(variant)
        if launch is None:
            self.refuse_capture(f"compiling {variant}")
            launch = self._launches[variant] = self._bind(variant)
        return launch
