"""The ring of packets, on a device whose copies and launches are played by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.backends import pinned
from fused_slots.backends.pinned import MARK_EVERY, RING_SIZE, PinnedRing
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout

GROUPS = (KVCacheGroup(16, 4096), KVCacheGroup(32, 64, kernel_block_size=16))
CPU = torch.device("cpu")


class Device:
    """The device is current inside of this; tells whether it is."""

    current: torch.device | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        Device.current = self.device

    def __exit__(self, *_: object) -> None:
        Device.current = None


class Event:
    """Counts what the ring asks of it."""

    made: list[Event] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self) -> None:
        assert Device.current == CPU
        self.recorded = self.waited = 0
        Event.made.append(self)

    def record(self) -> None:
        assert Device.current == CPU
        self.recorded += 1

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture(autouse=True)
def _no_events() -> None:
    Event.made.clear()


def layout() -> TableLayout:
    return TableLayout(
        groups=GROUPS,
        widths=tuple(group.row_width for group in GROUPS),
        max_num_reqs=4,
        max_num_batched_tokens=8,
        context_parallel=ContextParallel(),
        replay_window=0,
        slot_dtype=torch.int64,
        num_blocks=(None, None),
    )


def test_a_packet_is_reused_only_after_the_event_behind_it() -> None:
    sizes = layout()
    rows, ring = HostRows(sizes), PinnedRing(CPU, new_event=Event, on_device=Device)
    copies = []
    for step in range(3 * RING_SIZE):
        segment = step % RING_SIZE // MARK_EVERY
        rows.stage(step % 4, [[step], [step + 1]], True)
        expected = np.empty(rows.packet_size, dtype=np.int32)
        longest = rows.pack(expected)
        lap = step // RING_SIZE
        copy, packed = ring.upload(rows.packet_size, rows.pack)
        rows.clear()
        assert packed == longest == 2
        if lap:
            # The event of this segment was recorded once a lap, and waited for before reuse.
            assert Event.made[segment].waited == lap
        assert copy[: len(expected)].tolist() == expected.tolist()
        copies.append(copy.data_ptr())
        ring.mark_used()
        assert sum(event.recorded for event in Event.made) == (step + 1) // MARK_EVERY
    assert len(set(copies)) == RING_SIZE
    assert copies[:RING_SIZE] == copies[RING_SIZE : 2 * RING_SIZE]


def test_a_packet_grows_with_its_writes_and_keeps_its_size() -> None:
    sizes = layout()
    rows, ring = HostRows(sizes), PinnedRing(CPU, new_event=Event, on_device=Device)
    lengths = []
    for blocks in (1, 3000, 2):
        for _ in range(RING_SIZE):
            rows.stage(0, [list(range(blocks)), []], True)
            copy, _ = ring.upload(rows.packet_size, rows.pack)
            assert copy[: rows.packet_size][-blocks:].tolist() == list(range(blocks))
            rows.clear()
            ring.mark_used()
        lengths.append(len(copy))
    assert lengths == [512, 4096, 4096]


def test_refused_pinned_memory_is_said_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("pinned memory is exhausted")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with caplog.at_level(logging.WARNING, logger=pinned.logger.name):
        assert not pinned._pinned_memory_works(CPU)
    assert "exhausted" in caplog.text
    assert "pageable" in caplog.text


def test_pinned_memory_that_arrives_changed_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    with caplog.at_level(logging.WARNING, logger=pinned.logger.name):
        assert not pinned._pinned_memory_works(CPU)
    assert "does not arrive intact" in caplog.text
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    assert pinned._pinned_memory_works(CPU)


@pytest.mark.parametrize(
    "defaults",
    [lambda: torch.device("meta"), torch.inference_mode],
    ids=["default device", "inference mode"],
)
def test_packets_depend_on_no_default(
    defaults: Callable[[], AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    with defaults():
        ring = PinnedRing(CPU, new_event=Event, on_device=Device)
        monkeypatch.setattr(ring, "_pinned", False)
        ring.upload(3, lambda array: array.fill(7))
    assert not caplog.records
    ring._packets_sent = 0
    packet, _ = ring.upload(3, lambda array: array.fill(8))
    assert packet[:3].tolist() == [8, 8, 8]
