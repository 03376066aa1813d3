"""Block tables on an NVIDIA GPU: torch's memory and streams, Triton's kernels.

Everything runs on the calling thread's current stream. `compute_slot_mappings` and `map_tokens`
may be captured into a CUDA graph once `warmup()` has compiled their variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.backends.launch import (
    FixedArguments,
    Launch,
    Launcher,
    Variant,
    kernel_source,
)
from fused_slots.backends.pinned import PinnedRing
from fused_slots.backends.triton_backend import T, TritonBackend
from fused_slots.faults import BackendUnavailableError, InvalidArgumentError
from fused_slots.layout import TableLayout


class CudaBackend(TritonBackend):
    """Block tables in GPU memory; `device` without an index is the current device."""

    name = "cuda"

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        self._ring: PinnedRing | None = None
        super().__init__(layout, _existing_device(device), checked)

    def make_launcher(self) -> Launcher:
        return CudaLauncher(self.device)

    def upload(
        self, size: int, fill: Callable[[npt.NDArray[np.int32]], T]
    ) -> tuple[torch.Tensor, T]:
        if self._ring is None:
            self._ring = PinnedRing(self.device)
        return self._ring.upload(size, fill)

    def uploaded_packet_used(self) -> None:
        if self._ring is not None:
            self._ring.mark_used()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self, operation: str) -> None:
        if self.is_capturing():
            raise InvalidArgumentError(
                operation,
                expected="no graph capture on this stream",
                actual="a capture in progress",
                hint="Apply staged writes and call warmup() before the capture; graphs may hold "
                "compute_slot_mappings and map_tokens",
            )


class CudaLauncher(Launcher):
    """Compiles a variant once and launches it with raw addresses.

    The kernel's own launch path inspects every argument to pick a specialisation. Here nothing is
    specialised on a value or an address that can change, so a bound variant stays right when
    tensors move or lose their alignment, and a launch passes numbers only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled = 0

    @property
    def compiled(self) -> int:
        return self._compiled

    def bind(
        self,
        kernel: Any,
        variant: Variant,
        num_groups: int,
        changing_types: Sequence[str],
        fixed: FixedArguments,
    ) -> Launch:
        import triton

        with torch.cuda.device(self._device):
            compiled = triton.compile(
                kernel_source(kernel, variant, changing_types, fixed),
                options=variant.cuda_options,
            )
            run = compiled.run
        self._compiled += 1
        function, metadata = compiled.function, compiled.packed_metadata
        tail = (
            *(tensor.data_ptr() for tensor in fixed.tensors),
            *fixed.numbers,
            *(value for _, value in variant.constants),
        )
        device = self._device
        index = device.index
        current_stream = torch._C._cuda_getCurrentRawStream
        current_device = torch._C._cuda_getDevice
        address_of = torch.Tensor.data_ptr
        needs_scratch = run.global_scratch_size or run.profile_scratch_size
        head: tuple[Any, ...] = (metadata, None, None, None)
        if needs_scratch:
            start = run
        else:
            start = run.launch
            head = (run.launch_cooperative_grid, run.launch_pdl, None, None, *head)

        def launch(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            if current_device() != index:
                with torch.cuda.device(device):
                    launch(programs, tensors, numbers)
                return
            addresses = map(address_of, tensors)
            stream = current_stream(index)
            start(num_groups, programs, 1, stream, function, *head, *addresses, *numbers, *tail)

        return launch


def _existing_device(device: torch.device) -> torch.device:
    """The device with its index.

    Raises:
        BackendUnavailableError: Triton, CUDA or this device is missing.
    """
    expected = "an NVIDIA GPU, PyTorch built for CUDA, and Triton"
    if find_spec("triton") is None:
        raise BackendUnavailableError(
            "device",
            expected=expected,
            actual=f"{device} without Triton",
            hint="pip install 'fused-slots[cuda]', or use device='cpu'",
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "device",
            expected=expected,
            actual=f"{device}, but torch {torch.__version__} sees no GPU",
            hint="Install PyTorch with CUDA and a driver, or use device='cpu'",
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise BackendUnavailableError(
            "device",
            expected=f"cuda:0 ... cuda:{torch.cuda.device_count() - 1}",
            actual=str(device),
        )
    return torch.device("cuda", index)
