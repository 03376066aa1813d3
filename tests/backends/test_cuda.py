"""What the CUDA backend does around the GPU, with the compiler and the driver played by hand."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends import cuda
from fused_slots.backends.launch import Binding, Variant
from fused_slots.faults import BackendUnavailableError, InvalidArgumentError

triton = pytest.importorskip("triton")

VARIANT = Variant("kernel", torch.int32, torch.int64, (("TILE", 8), ("POW2", True)), 4)
KERNEL = SimpleNamespace(arg_names=["slots_ptr", "num_pad", "table_ptr", "groups", "TILE", "POW2"])


class Driver:
    """A compiled kernel and a driver that note what is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: type[Run], **features: Any) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[dict[str, Any]] = []
        self.device = 1
        self.kernels: list[weakref.ref[CompiledKernel]] = []

        def compile_kernel(source: Any, options: dict[str, Any]) -> Any:
            self.compiled.append(options)
            kernel = CompiledKernel(run(self, **features))
            self.kernels.append(weakref.ref(kernel))
            return kernel

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


class CompiledKernel:
    function, packed_metadata = "function", "metadata"

    def __init__(self, run: Run) -> None:
        self.run = run


class Run:
    """Triton's launcher object: called itself it allocates scratch."""

    def __init__(self, driver: Driver, scratch: int = 0, error: str = "", **more: Any) -> None:
        def launch(*arguments: Any) -> None:
            driver.launched.append(("launch", *arguments))
            if error:
                raise TypeError(error)

        self.launch = launch
        self.num_ctas = 1
        self.global_scratch_size = scratch
        self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid = self.launch_pdl = False
        for name, value in more.items():
            setattr(self, name, value)


class FlatRun(Run):
    """Triton 3.6's."""

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # type: ignore
        self.launch("own call", gridX, gridY, gridZ, stream, function, *args)


class PackedRun(Run):
    """Triton 3.7.1's and later."""

    def __init__(self, driver: Driver, **more: Any) -> None:
        notes = {"arg_annotations": "annotations", "kernel_signature": "signature"}
        super().__init__(driver, **{**notes, **more})

    def __call__(  # type: ignore
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args
    ):  # fmt: skip
        head = (kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook)
        self.launch("own call", gridX, gridY, gridZ, stream, function, *head, *args)


def bind(driver: Driver) -> tuple[cuda.CudaLauncher, Any, torch.Tensor]:
    launcher = cuda.CudaLauncher(torch.device("cuda", 1))
    table = torch.zeros(4, dtype=torch.int32)
    launch = launcher.bind(Binding(KERNEL, VARIANT, 3, ["*i64", "i32"], (table,), (9,)))
    return launcher, launch, table


@pytest.mark.parametrize("run", [FlatRun, PackedRun])
def test_a_launch_passes_addresses_and_numbers_only(
    run: type[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, run)
    launcher, launch, table = bind(driver)
    assert launcher.compiled == 1
    assert driver.compiled == [{"num_warps": 4}]
    for moved in (torch.zeros(8), torch.zeros(9)[1:]):
        launch(5, [moved], [11])
        found = driver.launched[-1]
        arguments = (moved.data_ptr(), 11, table.data_ptr(), 9, 8, True)
        assert found[:8] == ("launch", 3, 5, 1, 701, "function", False, False)
        if run is FlatRun:
            assert found[8:] == (None, None, "metadata", None, None, None, *arguments)
        else:
            hooks, scratch = ("metadata", None, None, None), (None, None)
            assert found[8:] == (*hooks, *scratch, "annotations", "signature", arguments)
    assert launcher.compiled == 1


@pytest.mark.parametrize("run", [FlatRun, PackedRun])
def test_a_compiled_kernel_lives_as_long_as_its_launcher(
    run: type[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.8 unloads the code of a kernel that is collected."""
    driver = Driver(monkeypatch, run)
    launcher, launch, _ = bind(driver)
    gc.collect()
    assert driver.kernels[0]() is not None
    del launcher, launch
    gc.collect()
    assert driver.kernels[0]() is None


@pytest.mark.parametrize("run", [FlatRun, PackedRun])
@pytest.mark.parametrize("feature", [{"scratch": 64}, {"gsan_enabled": True}])
def test_what_a_kernel_needs_besides_goes_through_tritons_own_call(
    run: type[Run],
    feature: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(monkeypatch, run, **feature)
    _, launch, table = bind(driver)
    launch(5, [table], [11])
    head = ("launch", "own call", 3, 5, 1, 701, "function", "metadata", None, None, None)
    assert driver.launched[-1][:11] == head
    assert driver.launched[-1][11:13] == (table.data_ptr(), 11)
    known = run is PackedRun or "scratch" in feature
    assert not caplog.messages if known else "its own call" in caplog.text


def test_an_unknown_launcher_is_called_itself_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, PackedRun, launch_clusters=2)
    launcher, _, table = bind(driver)
    binding = Binding(KERNEL, VARIANT, 3, ["*i64", "i32"], (table,), (9,))
    launcher.bind(binding)(5, [table], [11])
    assert driver.launched[-1][:3] == ("launch", "own call", 3)
    (message,) = caplog.messages
    assert triton.__version__ in message
    assert "its own call" in message


@pytest.mark.parametrize("run", [FlatRun, PackedRun])
def test_a_variant_is_launched_on_nothing_as_it_is_bound(
    run: type[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, run)
    bind(driver)
    (tried,) = driver.launched
    assert tried[:4] == ("launch", 3, 1, 1)
    arguments = tried[-1] if run is PackedRun else tried[14:]
    assert arguments[1] == 1, "num_pad"


@pytest.mark.parametrize("run", [FlatRun, PackedRun])
def test_a_launcher_that_does_not_fit_is_named_before_anything_is_launched(
    run: type[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, run, error="function takes exactly 16 arguments (61 given)")
    with pytest.raises(BackendUnavailableError, match="61 given") as raised:
        bind(driver)
    assert triton.__version__ in raised.value.actual
    assert "device='cpu'" in raised.value.hint


def test_a_launch_runs_on_the_managers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, PackedRun)
    _, launch, _ = bind(driver)
    driver.device = 0
    launch(5, [torch.zeros(8)], [11])
    assert driver.device == 1
    assert len(driver.launched) == 2


def test_rocm_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    with pytest.raises(BackendUnavailableError, match=r"ROCm 7\.0\.51831") as raised:
        AscendBlockTables.from_groups(
            [KVCacheGroup(16, 4)], max_num_reqs=2, max_num_batched_tokens=8, device="cuda"
        )
    assert "device='cpu'" in raised.value.hint


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


def test_a_missing_triton_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="without Triton") as raised:
        cuda._existing_device(torch.device("cuda"))
    assert "triton>=3.6" in raised.value.hint


def test_nothing_is_uploaded_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cuda.CudaBackend.__new__(cuda.CudaBackend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backend.refuse_capture("step")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.is_capturing()
    with pytest.raises(InvalidArgumentError, match="a capture in progress") as raised:
        backend.refuse_capture("step")
    assert "warmup()" in raised.value.hint
