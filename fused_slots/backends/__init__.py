"""Devices behind one interface; each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from fused_slots import env
from fused_slots.backends.base import Backend
from fused_slots.faults import BackendUnavailableError, ConfigurationError

BackendClass = type[Backend]


def _load(module: str, name: str) -> Callable[[], BackendClass]:
    def load() -> BackendClass:
        backend: BackendClass = getattr(import_module(module), name)
        return backend

    return load


_BACKENDS: dict[str, Callable[[], BackendClass]] = {
    "ascend": _load("fused_slots.backends.ascend.device", "AscendBackend"),
    "cpu": _load("fused_slots.backends.cpu", "CpuBackend"),
    "cuda": _load("fused_slots.backends.cuda", "CudaBackend"),
    "interpreter": _load("fused_slots.backends.interpreter", "InterpreterBackend"),
}
_BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}
_DEVICE_OF_BACKEND = {"ascend": "npu", "cpu": "cpu", "cuda": "cuda", "interpreter": "cpu"}
_PACKAGES = {
    "ascend": "torch-npu 'triton-ascend>=3.2,<3.3'",
    "cuda": "'triton>=3.6'",
    "interpreter": "'triton>=3.6'",
}


def _install(backend: str) -> str:
    packages = _PACKAGES.get(backend)
    return f"pip install {packages}" if packages else ""


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device that a caller named.

    Raises:
        ConfigurationError: it is no device name.
        BackendUnavailableError: it is an npu, and torch_npu did not teach torch the name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        if isinstance(device, str) and device.split(":")[0] == "npu":
            raise BackendUnavailableError(
                "device",
                expected="torch_npu, which makes npu a device of torch",
                actual=repr(device),
                hint=_install("ascend"),
            ) from error
        raise ConfigurationError(
            "device", expected="cpu, cuda[:i], npu[:i] or a torch.device", actual=repr(device)
        ) from error


def backend_class(device: torch.device) -> BackendClass:
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
    if device.type != _DEVICE_OF_BACKEND[name]:
        raise BackendUnavailableError(
            "device",
            expected=f"{_DEVICE_OF_BACKEND[name]} with the {name} backend",
            actual=str(device),
            hint="FUSED_SLOTS_BACKEND names the backend",
        )
    try:
        backend = _BACKENDS[name]()
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
