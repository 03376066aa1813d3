"""Block tables on an NVIDIA GPU: torch's memory and streams, Triton's kernels.

Everything runs on the calling thread's current stream. `compute_slot_mappings` and `map_tokens`
may be captured into a CUDA graph once `warmup()` has compiled their variants.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from fused_slots.backends.device import Uploads
from fused_slots.backends.gpu import GpuBackend
from fused_slots.backends.launch import Binding, Launch, Launcher, kernel_source
from fused_slots.backends.pinned import PinnedRing
from fused_slots.faults import BackendUnavailableError
from fused_slots.layout import TableLayout

logger = logging.getLogger(__name__)

_FLAT = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")
_HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
_PACKED = (*_FLAT[:-1], *_HOOKS, "args")
_COMMON = {
    "num_ctas",
    "launch",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
    "launch_cooperative_grid",
    "launch_pdl",
}


class CudaBackend(GpuBackend):
    """Block tables in GPU memory; `device` without an index is the current device."""

    name = "cuda"

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, _existing_device(device), checked)

    def make_launcher(self) -> Launcher:
        return CudaLauncher(self.device)

    def make_uploads(self) -> Uploads:
        return PinnedRing(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class CudaLauncher(Launcher):
    """Compiles a variant once and launches it with raw addresses.

    The kernel's own launch path inspects every argument to pick a specialisation. Here nothing is
    specialised on a value or an address that can change, so a bound variant stays right when
    tensors move or lose their alignment, and a launch passes numbers only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # From Triton 3.8 on a compiled kernel that is collected unloads its code.
        self._kernels: list[Any] = []
        self._unknown_told = False

    def prepare(self, binding: Binding) -> Launch:
        import triton

        variant = binding.variant
        with torch.cuda.device(self._device):
            compiled = triton.compile(kernel_source(binding), options=variant.cuda_options)
            run = compiled.run
        self._kernels.append(compiled)
        self.compiled += 1
        call = prepared_call(run, compiled.packed_metadata)
        if not call.known and not self._unknown_told:
            self._unknown_told = True
            logger.warning(
                "Triton %s launches in a way that is not known here; kernels go through its own "
                "call, which costs the host a few microseconds more",
                triton.__version__,
            )
        tail = (
            *(tensor.data_ptr() for tensor in binding.tensors),
            *binding.numbers,
            *(value for _, value in variant.constants),
        )
        return self._launch(call, compiled.function, binding.num_groups, tail)

    def _launch(
        self, call: PreparedCall, function: Any, num_groups: int, tail: tuple[Any, ...]
    ) -> Launch:
        start, head = call.start, call.head
        device = self._device
        index = device.index
        current_stream = torch._C._cuda_getCurrentRawStream
        current_device = torch._C._cuda_getDevice
        address_of = torch.Tensor.data_ptr

        def flat(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            if current_device() != index:
                with torch.cuda.device(device):
                    flat(programs, tensors, numbers)
                return
            addresses = map(address_of, tensors)
            stream = current_stream(index)
            start(num_groups, programs, 1, stream, function, *head, *addresses, *numbers, *tail)

        def packed(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            if current_device() != index:
                with torch.cuda.device(device):
                    packed(programs, tensors, numbers)
                return
            arguments = (*map(address_of, tensors), *numbers, *tail)
            start(num_groups, programs, 1, current_stream(index), function, *head, arguments)

        return packed if call.packed else flat


@dataclass(frozen=True)
class PreparedCall:
    """How a release of Triton is asked to launch a kernel.

    Attributes:
        start: called with the grid (three numbers), the stream, the function, `head` and the
            kernel's arguments, constants included.
        head: what stands between the function and the arguments.
        packed: the arguments are one tuple.
        known: False for the launcher object's own call, because nothing else is known to be right.
    """

    start: Callable[..., Any]
    head: tuple[Any, ...]
    packed: bool
    known: bool = True


def prepared_call(launcher: Any, metadata: Any) -> PreparedCall:
    """The quickest launch that a Triton launcher object is known to offer, told by what it has.

    Triton 3.6's takes the arguments one by one behind scratch memory, metadata and hooks; those of
    3.7.1 and 3.8 take them in one tuple behind annotations and signature. The object's own call
    takes the same positions in all of them. It is made where the object has anything unknown, and
    where a kernel needs scratch memory, which it allocates.

    Args:
        launcher: `CompiledKernel.run`.
        metadata: `CompiledKernel.packed_metadata`.
    """
    own_call = PreparedCall(launcher, (metadata, None, None, None), packed=False)
    features = vars(launcher)
    parameters = tuple(inspect.signature(type(launcher).__call__).parameters)
    instrumented = features.get("gsan_enabled", False)
    packed = parameters == _PACKED and features.keys() - {"gsan_enabled"} == {
        *_COMMON,
        "arg_annotations",
        "kernel_signature",
    }
    if not packed and not (parameters == _FLAT and features.keys() == _COMMON):
        return replace(own_call, known=False)
    if instrumented or launcher.global_scratch_size or launcher.profile_scratch_size:
        return own_call
    hooks = (metadata, None, None, None)
    scratch = (None, None)  # global, of a profiler
    grid = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    if packed:
        head = (*grid, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature)
        return PreparedCall(launcher.launch, head, packed)
    return PreparedCall(launcher.launch, (*grid, *scratch, *hooks), packed)


def _existing_device(device: torch.device) -> torch.device:
    """The device with its index.

    Raises:
        BackendUnavailableError: Triton, CUDA or this device is missing.
    """
    actual, hint = "", "Use device='cpu'"
    if torch.version.hip is not None:
        actual = (
            f" of PyTorch for ROCm {torch.version.hip}, whose Triton launches kernels in a way "
            "that is not served yet"
        )
    elif find_spec("triton") is None:
        actual, hint = " without Triton", "pip install 'triton>=3.6', or use device='cpu'"
    elif not torch.cuda.is_available():
        actual = f", but torch {torch.__version__} sees no GPU"
        hint = "Install PyTorch with CUDA and a driver, or use device='cpu'"
    if actual:
        raise BackendUnavailableError(
            "device",
            expected="an NVIDIA GPU, PyTorch built for CUDA, and Triton",
            actual=f"{device}{actual}",
            hint=hint,
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise BackendUnavailableError(
            "device",
            expected=f"cuda:0 ... cuda:{torch.cuda.device_count() - 1}",
            actual=str(device),
        )
    return torch.device("cuda", index)
