"""Host-side rows: how many columns each request has filled, and writes waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fused_slots import env
from fused_slots.faults import INT32_MAX, BackendUnavailableError
from fused_slots.host.block_ids import check_row, plain_request, plain_write
from fused_slots.host.packet import unpack_writes
from fused_slots.host.python_staging import PythonStaging
from fused_slots.host.staging import StagedWrites
from fused_slots.layout import TableLayout

try:
    from fused_slots.host._staging import Staging as NativeStaging
except ImportError:  # no compiler was there when the package was installed
    NATIVE = False
else:
    NATIVE = True

Int32Array = npt.NDArray[np.int32]


class HostRows:
    """Row lengths on the host and the writes staged since the last step.

    `num_columns` (int32 [G, max_num_reqs]) is the truth about filled columns; the device's copy
    follows when the staged writes are applied. `generations` (int32 [max_num_reqs]) grow whenever
    a row changes below its end.

    Args:
        layout: the manager's sizes.

    Raises:
        BackendUnavailableError: FUSED_SLOTS_HOST=native, but that half was not built.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        # One row's lengths lie together: an append reads and writes a few of them.
        lengths = np.zeros((layout.max_num_reqs, layout.num_groups), dtype=np.int32)
        self.num_columns: Int32Array = lengths.T
        self.generations: Int32Array = np.zeros(layout.max_num_reqs, dtype=np.int32)
        self._largest_ids = np.zeros(layout.num_groups, dtype=np.int32)
        self._cells = np.zeros(lengths.shape, dtype=np.int32)  # unlike zeros_like, touches no page
        self._state_groups = [g for g, group in enumerate(layout.groups) if not group.maps_slots]
        self.released: set[int] = set()
        """Rows given back since it was last emptied."""
        self._calls_before = 0
        self.resize_pools(layout)

    def resize_pools(self, layout: TableLayout) -> None:
        """Accept the ids of this layout's pools; nothing may be staged."""
        if hasattr(self, "staging"):
            self._calls_before += self.staging.num_calls
        make = _native_staging if host_half() == "native" else PythonStaging
        self.staging: PythonStaging | NativeStaging = make(
            layout, self.num_columns.T, self.generations, self._largest_ids, self._cells
        )
        self._layout = layout
        # Bound here, since a call through a method of this class costs as much as its work.
        self.stage = self.staging.stage
        self.pack = self.staging.pack
        self.clear = self.staging.clear

    def write(
        self,
        req_index: int,
        first_blocks: Sequence[int],
        new_block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Stage a row's blocks from an allocation block on, for all groups or for none.

        Raises:
            InvalidArgumentError: no such row, not one entry per group, or a first block beyond
                the row's end.
            BlockIdError: an id is not an int the group accepts.
            RowCapacityError: a row would hold more columns than it has.
        """
        row, begins, lists = plain_write(
            self._layout, self.num_columns.T, req_index, first_blocks, new_block_ids
        )
        self.staging.write(row, begins, lists)

    def clear_row(self, req_index: int) -> None:
        """Stage the end of a row: it holds nothing in any group.

        Raises:
            InvalidArgumentError: no such row.
        """
        row = check_row(self._layout, req_index)
        self.staging.clear_row(row)
        self.released.add(row)

    def forget_device(self) -> None:
        """The device's tables hold anything: state rows that are given back are cleared whole."""
        for g in self._state_groups:
            self._cells[:, g] = self._layout.widths[g]

    @property
    def pending(self) -> bool:
        """Whether writes wait to be applied."""
        return self.staging.pending

    @property
    def staged_rows(self) -> frozenset[int]:
        """Rows with writes that wait to be applied."""
        return frozenset(self.staging.rows)

    @property
    def num_staged_rows(self) -> int:
        """Their number, which is the number of records that `pack` writes for a group."""
        return self.staging.num_rows

    @property
    def num_calls(self) -> int:
        """Calls that changed a row, since construction."""
        return self._calls_before + self.staging.num_calls

    @property
    def packet_size(self) -> int:
        """int32 elements that `pack` writes."""
        return self.staging.packet_size

    @property
    def largest_ids(self) -> list[int]:
        """Per group, the largest allocation block id ever staged."""
        largest: list[int] = self._largest_ids.tolist()
        return largest

    def collect(self) -> StagedWrites:
        """The writes staged since `clear`; they stay pending until it is called."""
        packet = np.empty(self.packet_size, dtype=np.int32)
        self.pack(packet)
        return unpack_writes(packet, self._layout, self.num_staged_rows)


def host_half() -> str:
    """The half that FUSED_SLOTS_HOST selects: "native" or "python".

    Raises:
        BackendUnavailableError: the native half is asked for, but was not built.
    """
    choice = env.HOST.read()
    if choice == "auto":
        return "native" if NATIVE else "python"
    if choice == "native" and not NATIVE:
        raise BackendUnavailableError(
            env.HOST.name + "=native",
            expected="fused_slots.host._staging, which installation compiles",
            actual="an installation without it",
            hint="Install a C compiler and Python's headers, then reinstall fused-slots; or use "
            f"{env.HOST.name}=auto",
        )
    return choice


def _native_staging(
    layout: TableLayout,
    lengths: Int32Array,
    generations: Int32Array,
    largest_ids: Int32Array,
    cells: Int32Array,
) -> NativeStaging:
    limits = [
        # A list that fills more columns than that fits no memory.
        (group.columns_per_block, min(width, INT32_MAX), largest, int(not group.maps_slots))
        for group, width, largest in zip(
            layout.groups, layout.widths, layout.max_block_ids, strict=True
        )
    ]
    return NativeStaging(
        partial(plain_request, layout, lengths),
        lengths,
        generations,
        largest_ids,
        cells,
        np.array(limits, dtype=np.int64).reshape(-1, 4),
    )
