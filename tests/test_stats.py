"""What stats() counts, that it counts it on every backend, and that it waits for no launch."""

from __future__ import annotations

import threading

import pytest
import torch

from fused_slots import AscendBlockTables, FaultCode, KVCacheGroup
from fused_slots.backends.pinned import MARK_EVERY, RING_SIZE, PinnedRing
from fused_slots.vllm.v1 import MultiGroupBlockTable
from tests.backends_under_test import BACKENDS, MakeTables

GROUPS = [KVCacheGroup(4, 8, name="full"), KVCacheGroup(4, 1, circular=True)]


def one_step(tables: AscendBlockTables, row: int = 0) -> None:
    with tables.device:
        rows, starts = torch.tensor([row]), torch.tensor([0, 3], dtype=torch.int32)
        tables.step(rows, starts, torch.tensor([0, 1, 6]))


@pytest.mark.parametrize("half", ["native", "python"])
@pytest.mark.parametrize("make_tables", BACKENDS, ids=str)
def test_counts_of_a_short_life(
    make_tables: MakeTables, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_HOST", half)
    tables = make_tables(GROUPS, num_blocks=9)  # applies nothing
    assert tables.stats().faults == ()
    tables.append_block_ids(0, ([1], [2]), True)
    tables.append_block_ids(1, ([3], [4]), True)
    one_step(tables)
    with pytest.raises(ValueError, match="num_blocks"):
        tables.append_block_ids(1, ([99], []), False)
    tables.resize_pools(20)
    tables.write_block_ids(1, (0, 1), ([12], []))
    tables.clear_row(1)
    one_step(tables)
    tables.compute_slot_mappings(
        torch.tensor([1], device=tables.device),
        torch.tensor([0, 2], dtype=torch.int32, device=tables.device),
        torch.tensor([0, 1], device=tables.device),
        2,
    )
    stats = tables.stats()
    assert (stats.steps, stats.launches, stats.appends, stats.rows) == (2, 3, 4, 1)
    assert (stats.packets, stats.ring_waits) == (2, 0)
    record = 2 + 3 * len(GROUPS)  # a packet has a number a row, its records, and the columns' ids
    assert stats.bytes_staged == 4 * (4 + 2 * record + 4) + 4 * (4 + record)
    full, ring = FaultCode.COLUMN_OUT_OF_ROW, FaultCode.EMPTY_RING
    found = {(fault.code, fault.group_name or fault.group): fault.count for fault in stats.faults}
    assert found == {(full, "full"): 4, (ring, 1): 2}
    assert sum(fault.count for fault in tables.take_faults()) == 6
    one_step(tables)
    found = {(fault.code, fault.group): fault.count for fault in tables.stats().faults}
    assert found == {(full, 0): 5, (ring, 1): 2}, "those that were taken stay"
    assert "3 steps, 4 launches" in str(tables.stats())


def test_v1_steps_are_slot_mappings() -> None:
    tables = MultiGroupBlockTable(2, 8, False, "cpu", [4], [4])
    tables.add_row([[1]], 0)
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]))
    stats = tables.manager.stats()
    assert (stats.steps, stats.launches, stats.appends, stats.rows) == (1, 1, 0, 1)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = AscendBlockTables.from_groups(GROUPS, max_num_reqs=2, max_num_batched_tokens=8)
    monkeypatch.setattr(tables._backend, "is_capturing", lambda: True, raising=False)
    one_step(tables)
    assert tables.stats().faults == ()
    monkeypatch.setattr(tables._backend, "is_capturing", lambda: False)
    assert len(tables.stats().faults) == 2
    monkeypatch.setattr(tables._backend, "is_capturing", lambda: True)
    one_step(tables)
    assert sum(fault.count for fault in tables.stats().faults) == 6, "as they were read last"
    assert sum(fault.count for fault in tables.take_faults()) == 12
    assert sum(fault.count for fault in tables.stats().faults) == 12, "none of them twice"


class Event:
    """Not reached yet when it is first asked."""

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


def test_waits_are_those_for_the_device() -> None:
    ring = PinnedRing(torch.device("cpu"), new_event=Event, on_device=lambda _: threading.Lock())
    for packet in range(2 * RING_SIZE):
        if packet == RING_SIZE + MARK_EVERY:
            ring._events[1].reached = True
        ring.upload(10, lambda array: array.fill(0))
        ring.mark_used()
    assert ring.sent == (2 * RING_SIZE, 4 * 10 * 2 * RING_SIZE, RING_SIZE // MARK_EVERY - 1)
