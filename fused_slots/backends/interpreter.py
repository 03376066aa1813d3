"""The accelerators' kernels in Triton's interpreter, on host memory, for tests and debugging.

Set FUSED_SLOTS_BACKEND=interpreter and TRITON_INTERPRET=1 before Triton is imported; kernels then
run line by line in Python and can be stopped in a debugger.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from fused_slots.backends.base import Sent
from fused_slots.backends.device import Fill, T, Uploads
from fused_slots.backends.gpu import GpuBackend
from fused_slots.backends.launch import InterpretedLauncher, Launcher
from fused_slots.faults import BackendUnavailableError
from fused_slots.layout import TableLayout


class InterpreterBackend(GpuBackend):
    """Block tables in host memory, worked on by interpreted kernels."""

    name = "interpreter"
    reads_tensors_on_host = True

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        missing = find_spec("triton") is None
        if missing or os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendUnavailableError(
                "FUSED_SLOTS_BACKEND=interpreter",
                expected="triton installed and TRITON_INTERPRET=1 set before it is imported",
                actual=f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')!r}, triton "
                + ("missing" if missing else "installed"),
                hint="pip install 'triton>=3.6'",
            )
        super().__init__(layout, device, checked)

    def make_launcher(self) -> Launcher:
        return InterpretedLauncher()

    def make_uploads(self) -> Uploads:
        return HostPackets()

    def synchronize(self) -> None:
        """Nothing: the interpreter has finished when a launch returns."""


class HostPackets:
    """Packets in host memory, a new one each time."""

    sent = Sent(0, 0, 0)

    def upload(self, size: int, fill: Fill[T]) -> tuple[torch.Tensor, T]:
        self.sent = Sent(self.sent.packets + 1, self.sent.bytes + 4 * size, 0)
        packet = torch.empty(size, dtype=torch.int32, device="cpu")
        return packet, fill(packet.numpy())

    def mark_used(self) -> None:
        """Nothing: every packet is used once."""
