"""Staged writes on their way to a device: pinned packets in a ring that waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.backends.base import Sent

logger = logging.getLogger(__name__)

RING_SIZE = 32
"""Packets that may be in flight before the host waits for the device."""

MARK_EVERY = 8
"""Packets between two events; recording one costs the host more than filling a packet."""

T = TypeVar("T")

SMALLEST = 512
"""int32 elements of the smallest packet buffer; larger ones double."""


class _Packet:
    """One place of the ring: pinned memory and its copy on the device, by size class."""

    @torch.inference_mode(False)  # it is written in later calls that may be outside of that mode
    def __init__(self, size: int, device: torch.device, pinned: bool) -> None:
        self.host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.array = self.host.numpy()
        self.copy = torch.empty(size, dtype=torch.int32, device=device)
        sizes = [SMALLEST << power for power in range((size // SMALLEST).bit_length())]
        # Slices of both, made once: a slice costs a quarter of what its copy costs.
        self.parts = [(length, self.host[:length], self.copy[:length]) for length in sizes]

    def send(self, size: int) -> None:
        """Copy at least the first `size` elements to the device, in stream order."""
        for length, host, copy in self.parts:
            if size <= length:
                copy.copy_(host, non_blocking=True)
                return


class PinnedRing:
    """Packets that are filled by the host, copied once, and reused when the device is done.

    A packet is not written again before the launch that read it has finished. An event behind
    every eighth launch tells, however many steps are in flight; should the launches come from
    several streams, each of them must wait for the one before, as the tables themselves need.

    Args:
        device: where the packets go.
        new_event: makes an event of the device, with `record` and `synchronize`.
        on_device: makes a context in which a device is the current one.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        new_event: Callable[[], Any] = torch.cuda.Event,
        on_device: Callable[[torch.device], AbstractContextManager[Any]] = torch.cuda.device,
    ) -> None:
        self._device = device
        self._new_event, self._on_device = new_event, on_device
        self._pinned = _pinned_memory_works(device)
        self._packets: list[_Packet | None] = [None] * RING_SIZE
        self._events: list[Any] = [None] * (RING_SIZE // MARK_EVERY)
        self._packets_sent = self._elements = self._waits = 0

    @property
    def sent(self) -> Sent:
        """Packets so far, their bytes, and how often the host waited for the device."""
        return Sent(self._packets_sent, 4 * self._elements, self._waits)

    def upload(
        self, size: int, fill: Callable[[npt.NDArray[np.int32]], T]
    ) -> tuple[torch.Tensor, T]:
        """Copy a packet to the device, in stream order.

        Args:
            size: int32 elements of the packet.
            fill: writes it into an array at least as long.

        Returns:
            The int32 packet on the device, at least as long, and what `fill` returned.
        """
        place = self._packets_sent % RING_SIZE
        if place % MARK_EVERY == 0:
            event = self._events[place // MARK_EVERY]
            if event is not None and not event.query():
                self._waits += 1
                event.synchronize()
        packet = self._packets[place]
        if packet is None or len(packet.array) < size:
            doublings = max((size - 1) // SMALLEST, 0).bit_length()
            packet = _Packet(SMALLEST << doublings, self._device, self._pinned)
            self._packets[place] = packet
        filled = fill(packet.array)
        packet.send(size)
        self._elements += size
        return packet.copy, filled

    def mark_used(self) -> None:
        """The launch that reads the last packet is enqueued: remember where it ends."""
        self._packets_sent += 1
        mark, rest = divmod(self._packets_sent, MARK_EVERY)
        if rest == 0:
            mark = (mark - 1) % (RING_SIZE // MARK_EVERY)
            with self._on_device(self._device):
                event = self._events[mark]
                if event is None:
                    event = self._events[mark] = self._new_event()
                event.record()


def _pinned_memory_works(device: torch.device) -> bool:
    """Copy a pattern through pinned memory and look whether it arrives."""
    pattern = torch.arange(1024, dtype=torch.int32, device="cpu")
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


class FaultsAside:
    """Fault counters, copied beside the device's work, on a stream of their own.

    Args:
        counts: int64 [codes + 1, G] on the device.
    """

    @torch.inference_mode(False)
    def __init__(self, counts: torch.Tensor) -> None:
        self._counts, self._device = counts, counts.device
        self._runtime = getattr(torch, counts.device.type)
        self._stream = self._runtime.Stream(device=counts.device)
        self._event = self._runtime.Event()
        pinned = _pinned_memory_works(counts.device)
        self._host = torch.zeros(counts.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def start(self) -> None:
        """Begin to copy them, as far as the launches have come."""
        with self._runtime.stream(self._stream):
            self._host.copy_(self._counts, non_blocking=True)
            self._event.record()

    def arrived(self) -> bool:
        """Whether the copy is there."""
        return bool(self._event.query())

    def read(self) -> npt.NDArray[np.int64]:
        """The copy, to keep; waits for it alone."""
        self._event.synchronize()
        return np.array(self._host.numpy())
