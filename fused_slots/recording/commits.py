"""What v1 commits, for the flight recorder: a runner writes rows behind the manager's back.

Rows are compared with those committed before, up to the columns that are filled: no slot comes from
what lies behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fused_slots.recording.flight import FlightRecorder
from fused_slots.recording.kept import as_blocks
from fused_slots.recording.steps import Append


def record_commits(storage: Any, recorder: FlightRecorder) -> None:
    """Record each commit of these v1 tables, from now on."""
    groups = storage.manager.layout.groups
    known = [table.np.copy() for table in storage.tables]
    lengths, commit = storage.lengths.copy(), storage.commit

    def recorded(num_reqs: int, committed: Sequence[int]) -> None:
        commit(num_reqs, committed)
        rows: dict[int, list[tuple[int, list[int]]]] = {}
        torn = 0
        for g in committed:
            new, n = storage.lengths[g, :num_reqs], groups[g].columns_per_block
            old = lengths[g, :num_reqs]
            width = int(max(new.max(initial=0), old.max(initial=0)))
            before, now = known[g][:num_reqs, :width], storage.tables[g].np[:num_reqs, :width]
            differs = (before != now) & (np.arange(width) < new[:, None])
            for row in np.flatnonzero(differs.any(1) | (new != old)).tolist():
                end = min(int(old[row]), int(new[row]))
                where = differs[row, :end]
                first = (int(where.argmax()) if where.any() else end) // n
                blocks, whole = as_blocks(storage.tables[g].np[row, first * n : new[row]], n)
                write = rows.setdefault(
                    row,
                    [
                        (int(length) // group.columns_per_block, [])
                        for length, group in zip(lengths[:, row], groups, strict=True)
                    ],
                )
                torn += not whole
                write[g] = (first, blocks)
            before[:] = now
            lengths[g, :num_reqs] = new
        if rows:
            appends = [
                Append(row, tuple(w[1] for w in write), False, tuple(w[0] for w in write))
                for row, write in rows.items()
            ]
            recorder.add_rows(appends, torn)

    storage.commit = recorded
