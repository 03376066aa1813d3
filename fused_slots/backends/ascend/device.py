"""Block tables on an Ascend NPU: torch_npu's memory and streams, triton-ascend's kernels.

Everything runs on the calling thread's current stream. `compute_slot_mappings` and `map_tokens`
may be captured into an ACL graph once `warmup()` has compiled their variants.

Not run on hardware: tests run this file against a fake of the calls it makes, and the kernels'
compiled code in an executor (docs/ascend.md says what that covers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any

import torch

from fused_slots.backends.ascend.arguments import COMPILE_OPTIONS, compile_time_values
from fused_slots.backends.ascend.operations import AscendOperations
from fused_slots.backends.device import Uploads
from fused_slots.backends.launch import Binding, Launch, Launcher
from fused_slots.backends.pinned import PinnedRing
from fused_slots.faults import BackendUnavailableError
from fused_slots.layout import TableLayout
from fused_slots.logs import logger

COMPILE_ATTEMPTS = 8


class AscendBackend(AscendOperations):
    """Block tables in NPU memory; `device` without an index is the current device."""

    name = "ascend"

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, _existing_device(device), checked)

    def make_launcher(self) -> Launcher:
        return AscendLauncher(self.device)

    def count_cores(self) -> int:
        from triton.runtime import driver

        properties = driver.active.utils.get_device_properties(self.device.index)
        return int(properties["num_vectorcore"])

    def make_uploads(self) -> Uploads:
        npu = _npu()
        return PinnedRing(self.device, new_event=npu.Event, on_device=npu.device)

    def synchronize(self) -> None:
        _npu().synchronize(self.device)

    def is_capturing(self) -> bool:
        return bool(_npu().is_current_stream_capturing())


class AscendLauncher(Launcher):
    """Compiles a variant once and calls its launcher directly.

    The kernel's own launch path inspects every argument to pick a specialisation. Here nothing is
    specialised on a value or an address, so a bound variant stays right when they change.
    """

    known = "triton-ascend 3.2.0 is known to"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, binding: Binding) -> Launch:
        import triton
        from triton.compiler import ASTSource
        from triton.runtime import driver

        npu, device, options = _npu(), self._device, COMPILE_OPTIONS
        with npu.device(device):
            # triton-ascend 3.2: the signature names runtime arguments only.
            source = ASTSource(
                binding.kernel, runtime_signature(binding), compile_time_values(binding.variant)
            )
            compiled = past_crashes(
                lambda: triton.compile(source, options=options), str(binding.variant)
            )
            compiled._init_handles()
        check_compiled(compiled, options, f"{binding.variant} on {device}")
        self.compiled += 1
        num_groups, tail = binding.num_groups, (*binding.tensors, *binding.numbers)
        head = (compiled.function, compiled.packed_metadata, None, None, None)
        run, current_stream = compiled.run, driver.active.get_current_stream

        def launch(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            if npu.current_device() != device.index:
                with npu.device(device):
                    launch(programs, tensors, numbers)
                return
            stream = current_stream(device.index)
            run(num_groups * programs, 1, 1, stream, *head, *tensors, *numbers, *tail)

        return launch


def past_crashes(compile_once: Callable[[], Any], variant: str) -> Any:
    """What the compiler makes of a variant, tried again where a signal ended it.

    triton-ascend 3.2.0's way from Triton to linalg dies of SIGSEGV in about one of ten runs on the
    same text of some variants, those of sizes that are no powers of two; whenever it ends by itself
    its output is the same (docs/ascend.md).
    """
    attempt = 1
    while True:
        try:
            return compile_once()
        except Exception as error:
            # triton-ascend raises an error of its own while it handles this one.
            crash = error if isinstance(error, CalledProcessError) else error.__context__
            signal = -getattr(crash, "returncode", 0)
            if signal <= 0 or attempt == COMPILE_ATTEMPTS:
                raise
        attempt += 1
        logger.warning(
            "The compiler ended by signal %d on %s; attempt %d of %d follows",
            *(signal, variant, attempt, COMPILE_ATTEMPTS),
        )


def check_compiled(compiled: Any, options: dict[str, bool], what: str) -> None:
    """That a compiled kernel is what was asked for, and that a launch of it is one.

    triton-ascend drops options that it does not know, and launches nothing under
    TRITON_COMPILE_ONLY, both without a word.

    Raises:
        BackendUnavailableError: one of them happened.
    """
    taken = {name: getattr(compiled.metadata, name, None) for name in options}
    if taken != options:
        raise BackendUnavailableError(
            f"options of {what}",
            expected=f"{options}, with which kernels fit into on-chip memory",
            actual=f"{taken} in what the compiler took",
            hint="triton-ascend 3.2.0 takes them",
        )
    if getattr(compiled.run, "compile_only", False):
        raise BackendUnavailableError(
            f"a launch of {what}",
            expected="one that runs the kernel",
            actual="TRITON_COMPILE_ONLY, under which triton-ascend launches nothing",
            hint="Unset it",
        )


def runtime_signature(binding: Binding) -> dict[str, str]:
    """Triton types of a kernel's runtime arguments, by name."""
    constants = compile_time_values(binding.variant)
    names = [name for name in binding.kernel.arg_names if name not in constants]
    return dict(zip(names, binding.types, strict=True))


def _npu() -> Any:
    """torch.npu, which importing torch_npu adds."""
    import torch_npu  # noqa: F401 - adds torch.npu

    return torch.npu  # type: ignore[attr-defined]


def _existing_device(device: torch.device) -> torch.device:
    """The device with its index.

    Raises:
        BackendUnavailableError: torch_npu, CANN, triton-ascend or this device is missing.
    """
    expected = "an Ascend NPU, CANN, torch_npu and triton-ascend"
    hint = "Install torch-npu and triton-ascend, source CANN's set_env.sh, or use device='cpu'"

    def unavailable(actual: str) -> BackendUnavailableError:
        return BackendUnavailableError("device", expected=expected, actual=actual, hint=hint)

    try:
        npu = _npu()
    except (ImportError, OSError, RuntimeError) as error:  # without CANN its libraries fail
        raise unavailable(f"{device}, but torch_npu does not import: {error}") from error
    if find_spec("triton") is None or find_spec("triton.backends.ascend") is None:
        raise unavailable(f"{device} without triton-ascend")
    if not npu.is_available():
        raise unavailable(f"{device}, but torch_npu sees no NPU")
    index = npu.current_device() if device.index is None else device.index
    if index >= npu.device_count():
        raise unavailable(f"{device} of npu:0 ... npu:{npu.device_count() - 1}")
    return torch.device(device.type, index)
