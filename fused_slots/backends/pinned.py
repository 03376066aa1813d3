"""Staged writes on their way to the GPU: pinned packets in a ring that waits for the device."""

from __future__ import annotations

import logging

import torch

from fused_slots.backends.packet import pack_writes, packet_size
from fused_slots.layout import TableLayout
from fused_slots.staging import StagedWrites

logger = logging.getLogger(__name__)

RING_SIZE = 8
"""Packets that may be in flight before the host waits for the device."""


class PinnedRing:
    """Packets that are filled by the host, copied once, and reused when the device is done.

    A packet is not written again before the launch that read it has finished, which an event
    behind that launch tells, however many steps are in flight and on whichever streams.
    """

    def __init__(self, layout: TableLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._pinned = _pinned_memory_works(device)
        self._hosts: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)] * RING_SIZE
        self._copies: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)] * RING_SIZE
        self._events: list[torch.cuda.Event | None] = [None] * RING_SIZE
        self._place = 0

    def upload(self, writes: StagedWrites) -> torch.Tensor:
        """Copy staged writes to the device, in stream order.

        Args:
            writes: the merged writes of one step.

        Returns:
            int32 packet on the device, at least as long as the writes need.
        """
        place, size = self._place, packet_size(writes, self._layout)
        event = self._events[place]
        if event is not None:
            event.synchronize()
        if self._hosts[place].shape[0] < size:
            self._grow(place, size)
        host, copy = self._hosts[place], self._copies[place]
        pack_writes(writes, self._layout, host.numpy())
        copy[:size].copy_(host[:size], non_blocking=True)
        return copy

    def mark_used(self) -> None:
        """The launch that reads the last packet is enqueued: remember where it ends."""
        event = self._events[self._place]
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._events[self._place] = event
        event.record()
        self._place = (self._place + 1) % RING_SIZE

    def _grow(self, place: int, size: int) -> None:
        capacity = max(2 * size, 4096)
        self._hosts[place] = torch.empty(capacity, dtype=torch.int32, pin_memory=self._pinned)
        self._copies[place] = torch.empty(capacity, dtype=torch.int32, device=self._device)


def _pinned_memory_works(device: torch.device) -> bool:
    """Copy a pattern through pinned memory and look whether it arrives."""
    pattern = torch.arange(1024, dtype=torch.int32)
    try:
        pinned = pattern.pin_memory()
        arrived = torch.empty_like(pattern, device=device).copy_(pinned, non_blocking=True)
        works = bool(torch.equal(arrived.cpu(), pattern))
    except RuntimeError as error:
        logger.warning("Pinned memory is refused (%s); staged writes use pageable memory", error)
        return False
    if not works:
        logger.warning("Pinned memory does not arrive intact; staged writes use pageable memory")
    return works
