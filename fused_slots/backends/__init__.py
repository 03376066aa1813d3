"""Devices behind one interface; each is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch

from fused_slots import env
from fused_slots.backends.base import Backend
from fused_slots.faults import BackendUnavailableError, ConfigurationError


class Registered(NamedTuple):
    """A backend: where its class is ("module:class"), torch's device type, what pip installs."""

    path: str
    device: str
    packages: str = ""


_BACKENDS = {
    "ascend": Registered(
        "fused_slots.backends.ascend.device:AscendBackend",
        "npu",
        "torch-npu 'triton-ascend>=3.2,<3.3'",
    ),
    "cpu": Registered("fused_slots.backends.cpu:CpuBackend", "cpu"),
    "cuda": Registered("fused_slots.backends.cuda:CudaBackend", "cuda", "'triton>=3.6'"),
    "interpreter": Registered(
        "fused_slots.backends.interpreter:InterpreterBackend", "cpu", "'triton>=3.6'"
    ),
}
_BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
"""Unless FUSED_SLOTS_BACKEND names another one."""


def _install(backend: str) -> str:
    packages = _BACKENDS[backend].packages
    return f"pip install {packages}" if packages else ""


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device that a caller named.

    Raises:
        ConfigurationError: it is no device name.
        BackendUnavailableError: it is an npu, and torch_npu, which teaches torch the name, is
            missing or does not import.
    """
    if isinstance(device, str) and device.split(":")[0] == "npu":
        _import_torch_npu(device)
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            "device", expected="cpu, cuda[:i], npu[:i] or a torch.device", actual=repr(device)
        ) from error


def _import_torch_npu(device: str) -> None:
    """So that torch knows the name, also where it was told not to load torch_npu by itself."""
    try:
        import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:  # without CANN its libraries fail
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch_npu"
        raise BackendUnavailableError(
            "device",
            expected="torch_npu, which makes npu a device of torch",
            actual=f"{device!r}, but torch_npu does not import: {error}",
            hint=_install("ascend") if missing else "Source CANN's set_env.sh in this shell",
        ) from error


def backend_class(device: torch.device) -> type[Backend]:
    """The backend for a device: the one FUSED_SLOTS_BACKEND names, else by the device's type.

    Raises:
        BackendUnavailableError: no backend serves this device, the one named serves another, or
            a package that it needs is missing.
        ConfigurationError: FUSED_SLOTS_PLAN asks for what the backend cannot do.
    """
    name = env.BACKEND.read() or _BACKEND_OF_DEVICE.get(device.type, "")
    if name not in _BACKENDS:
        raise BackendUnavailableError(
            "device",
            expected=" or ".join(sorted(_BACKEND_OF_DEVICE)),
            actual=f"{device}" + (f" with FUSED_SLOTS_BACKEND={name}" if name else ""),
        )
    registered = _BACKENDS[name]
    if device.type != registered.device:
        raise BackendUnavailableError(
            "device",
            expected=f"{registered.device} with the {name} backend",
            actual=str(device),
            hint="FUSED_SLOTS_BACKEND names the backend",
        )
    try:
        module, _, class_name = registered.path.partition(":")
        backend: type[Backend] = getattr(import_module(module), class_name)
    except ImportError as error:
        raise BackendUnavailableError(
            f"the {name} backend of device {device}",
            expected="its packages installed",
            actual=str(error),
            hint=_install(name),
        ) from error
    chosen = env.PLAN.read()
    if chosen not in backend.plans:
        raise ConfigurationError(
            "FUSED_SLOTS_PLAN",
            expected=f"{' or '.join(backend.plans)} with the {name} backend",
            actual=chosen,
            hint="Only GPUs deal programs to requests; an NPU's stride over all tokens, since each "
            "further program on a core pays its beginning again",
        )
    return backend
