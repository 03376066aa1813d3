"""A workload in a manager, followed in plain lists so that results are judged before any timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from fused_slots import AscendBlockTables
from fused_slots.reference import gathered_row, slot_mappings
from tests.workloads import Append, Workload, workload


class Prepared:
    """A manager with a workload's rows staged and applied, and the arguments of its step."""

    def __init__(self, name: str, load: Workload | None = None) -> None:
        self.load = load or workload(name)
        self.tables = self.load.make_tables("cpu")
        self.rows: list[dict[int, list[int]]] = [{} for _ in self.load.groups]
        self.stage(self.load.appends)
        self.tables.apply_staged_writes()
        self.tensors = self.load.tensors("cpu")

    def stage(self, appends: Sequence[Append]) -> None:
        """Stage a step's appends, and follow them in `rows`."""
        for row, block_ids, overwrite in appends:
            self.tables.append_block_ids(row, block_ids, overwrite)
            for g, (group, ids) in enumerate(zip(self.load.groups, block_ids, strict=True)):
                n = group.columns_per_block
                columns = [block_id * n + part for block_id in ids for part in range(n)]
                if overwrite:
                    self.rows[g][row] = columns
                else:
                    self.rows[g].setdefault(row, []).extend(columns)

    def next_step(self) -> list[Append]:
        """Move the workload on; the appends are the caller's to stage."""
        appends = self.load.next_step()
        self.tensors = self.load.tensors("cpu")
        return appends

    def check_slots(self, slots: torch.Tensor, num_groups: int | None = None) -> None:
        """Compare slots [G, capacity], tail included, with the scalar reference."""
        load = self.load
        expected = slot_mappings(
            load.groups[:num_groups],
            self.rows,
            load.idx_mapping.tolist(),
            load.query_start_loc.tolist(),
            load.positions.tolist(),
            slots.shape[1],
            load.context_parallel,
        )
        if not np.array_equal(slots.numpy(), np.array(expected)):
            raise AssertionError(f"{load.name}: slots differ from the reference; nothing timed")

    def check_tables(self, tables: Sequence[torch.Tensor]) -> None:
        """Compare gathered tables with the scalar reference."""
        load = self.load
        for g, (group, table) in enumerate(zip(load.groups, tables, strict=True)):
            expected = [
                gathered_row(
                    group,
                    self.rows[g][row],
                    table.shape[1],
                    int(load.num_computed_tokens[row]),
                    load.context_parallel,
                )
                for row in load.idx_mapping.tolist()
            ]
            if not np.array_equal(table.numpy(), np.array(expected)):
                raise AssertionError(f"{load.name}: tables differ from the reference")


def ratio_beside(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int = 301
) -> dict[str, float]:
    """Median microseconds of CPU time of both, measured in turns, and ours over the peer's.

    Turns make both meet the same neighbours on a busy machine.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, kept in zip((ours, peer), times, strict=True):
            begin = time.process_time_ns()
            call()
            kept.append((time.process_time_ns() - begin) / 1000)
    ours_us, peer_us = map(median, times)
    return {"ours_us": ours_us, "peer_us": peer_us, "ours_over_peer": ours_us / peer_us}


def per_group_managers(load: Workload) -> list[AscendBlockTables]:
    """The peer that has one manager a group, its rows set up as `load.appends` says."""
    managers = [
        AscendBlockTables.from_groups(
            [group],
            max_num_reqs=load.max_num_reqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            context_parallel=load.context_parallel,
        )
        for group in load.groups
    ]
    for row, block_ids, overwrite in load.appends:
        for manager, ids in zip(managers, block_ids, strict=True):
            manager.append_block_ids(row, (ids,), overwrite)
    for manager in managers:
        manager.apply_staged_writes()
    return managers
