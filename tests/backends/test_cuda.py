"""What the CUDA backend does around the GPU, with the compiler and the driver played by hand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_slots.backends import cuda
from fused_slots.backends.launch import FixedArguments, Variant
from fused_slots.faults import BackendUnavailableError, InvalidArgumentError

triton = pytest.importorskip("triton")

VARIANT = Variant("kernel", torch.int32, torch.int64, (("TILE", 8), ("POW2", True)), 4)


class Driver:
    """A compiled kernel and a driver that note what is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scratch: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[dict[str, Any]] = []
        self.device = 1
        run = Run(self, scratch)

        def compile_kernel(source: Any, options: dict[str, Any]) -> Any:
            self.compiled.append(options)
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        monkeypatch.setattr(triton, "compile", compile_kernel)
        monkeypatch.setattr(cuda, "kernel_source", lambda *arguments: "source")
        monkeypatch.setattr(torch.cuda, "device", self.enter)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: 700 + index, raising=False
        )

    def enter(self, device: torch.device) -> Any:
        self.device = device.index
        return nullcontext()


class Run:
    """Triton's launcher: called itself it allocates scratch, `launch` takes raw arguments."""

    launch_cooperative_grid = False
    launch_pdl = False

    def __init__(self, driver: Driver, scratch: int) -> None:
        self.driver = driver
        self.global_scratch_size = scratch
        self.profile_scratch_size = 0

    def __call__(self, *arguments: Any) -> None:
        self.driver.launched.append(("run", *arguments))

    def launch(self, *arguments: Any) -> None:
        self.driver.launched.append(("launch", *arguments))


def bind(driver: Driver) -> tuple[cuda.CudaLauncher, Any, torch.Tensor]:
    launcher = cuda.CudaLauncher(torch.device("cuda", 1))
    table = torch.zeros(4, dtype=torch.int32)
    launch = launcher.bind("kernel", VARIANT, 3, ["*i64", "i32"], FixedArguments((table,), (9,)))
    return launcher, launch, table


def test_a_launch_passes_addresses_and_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    launcher, launch, table = bind(driver)
    assert launcher.compiled == 1
    assert driver.compiled == [{"num_warps": 4}]
    for moved in (torch.zeros(8), torch.zeros(9)[1:]):
        launch(5, [moved], [11])
        *head, address, number, fixed, nine, tile, pow2 = driver.launched[-1]
        assert head[:6] == ["launch", 3, 5, 1, 701, "function"]
        assert (address, number, fixed, nine) == (moved.data_ptr(), 11, table.data_ptr(), 9)
        assert (tile, pow2) == (8, True)
    assert launcher.compiled == 1


def test_a_kernel_with_scratch_memory_goes_through_tritons_own_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, scratch=64)
    _, launch, _ = bind(driver)
    launch(5, [torch.zeros(8)], [11])
    assert driver.launched[-1][:5] == ("run", 3, 5, 1, 701)


def test_a_launch_runs_on_the_managers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    _, launch, _ = bind(driver)
    driver.device = 0
    launch(5, [torch.zeros(8)], [11])
    assert driver.device == 1
    assert len(driver.launched) == 1


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="sees no GPU") as raised:
        cuda._existing_device(torch.device("cuda"))
    assert "device='cpu'" in raised.value.hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert cuda._existing_device(torch.device("cuda")) == torch.device("cuda", 1)
    with pytest.raises(BackendUnavailableError, match="cuda:5"):
        cuda._existing_device(torch.device("cuda", 5))


def test_a_missing_triton_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="without Triton") as raised:
        cuda._existing_device(torch.device("cuda"))
    assert "fused-slots[cuda]" in raised.value.hint


def test_nothing_is_uploaded_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cuda.CudaBackend.__new__(cuda.CudaBackend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.refuse_capture("step")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.is_capturing()
    with pytest.raises(InvalidArgumentError, match="a capture in progress") as raised:
        backend.refuse_capture("step")
    assert "warmup()" in raised.value.hint
