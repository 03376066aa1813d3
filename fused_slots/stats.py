"""What a manager has done so far, from counters that it keeps anyway."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fused_slots.backends.base import FaultReader
from fused_slots.faults import Fault, FaultCode

if TYPE_CHECKING:
    from fused_slots.base_tables import BaseTables


@dataclass(frozen=True)
class Stats:
    """Counts since a manager's construction; see `AscendBlockTables.stats`.

    Replays of graphs are in none of them but the faults.

    Attributes:
        steps: launches that gathered; of a manager that never gathers (v1), those that mapped
            tokens.
        launches: all operations started on the device.
        appends: calls that changed rows: append_block_ids, write_block_ids, clear_row. v1 rows
            are written on the host and count as none.
        rows: rows that hold a block in some group now, staged writes included.
        packets: transfers of staged writes.
        bytes_staged: bytes of these transfers.
        ring_waits: how often the host waited for the device before it could fill a packet.
        faults: tokens (or gathered rows) by code and group, as `take_faults` gives them unchecked,
            those that were taken included; as far as the device had come.
    """

    steps: int
    launches: int
    appends: int
    rows: int
    packets: int
    bytes_staged: int
    ring_waits: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = ", ".join(map(str, self.faults)) or "no fault"
        return (
            f"{self.steps:,} steps, {self.launches:,} launches, {self.appends:,} appends, "
            f"{self.rows:,} rows, {self.bytes_staged:,} bytes staged in {self.packets:,} packets, "
            f"{self.ring_waits:,} waits; {faults}"
        )


class FaultTotals:
    """Fault counts of a manager since its construction, read without waiting for launches."""

    def __init__(self, tables: BaseTables) -> None:
        self._backend = tables._backend
        self._reader: FaultReader | None = None
        self._taken: Counter[tuple[FaultCode, int]] = Counter()
        self._seen = np.zeros((len(FaultCode) + 1, tables.layout.num_groups), np.int64)

    def take(self, faults: list[Fault]) -> None:
        """These were taken from the device's counters, which are zero now."""
        self._seen[:] = 0
        for fault in faults:
            self._taken[fault.code, fault.group] += fault.count

    def read(self) -> list[Fault]:
        """One record per code and group; during a graph capture those that were read last."""
        if not self._backend.is_capturing():
            if self._reader is None:
                self._reader = self._backend.fault_reader()
            self._reader.start()
            self._seen = self._reader.read()
        counts = Counter(self._taken)
        for code, g in np.argwhere(self._seen > 0).tolist():
            counts[FaultCode(code), g] += int(self._seen[code, g])
        return [Fault(code, g, count) for (code, g), count in sorted(counts.items())]
