"""Injected faults: what is missing or fails around the manager, and what its user then meets."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, BlockTableError, KVCacheGroup
from fused_slots.backends import Registered, base
from fused_slots.faults import (
    FAULT_DETAILS,
    BackendUnavailableError,
    BlockIdError,
    ConfigurationError,
    InvalidArgumentError,
    RowCapacityError,
)
from tests.backends_under_test import MakeTables, batch_tensors, faults, gathered, int32, slots

ROOT = Path(__file__).parent.parent
PAGED = KVCacheGroup(block_size=16, max_num_blocks=8)


def build(**settings: Any) -> AscendBlockTables:
    return MakeTables("cpu")([PAGED], **settings)


def run_without(package: str, script: str, **environment: str) -> str:
    """Run a script in an interpreter that cannot import a package, and return what it printed."""
    hide = (
        "from importlib.machinery import PathFinder\n"
        "real = PathFinder.find_spec\n"
        "def hide(cls, name, path=None, target=None):\n"
        f"    hidden = name.split('.')[0] == {package!r}\n"
        "    return None if hidden else real(name, path, target)\n"
        "PathFinder.find_spec = classmethod(hide)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide + script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ASCEND = "pip install torch-npu 'triton-ascend>=3.2,<3.3'"
BUILD = """
from fused_slots import AscendBlockTables, BlockTableError, KVCacheGroup
try:
    tables = AscendBlockTables.from_groups([KVCacheGroup(16, 8)], max_num_reqs=4,
                                           max_num_batched_tokens=16, device={device!r})
    tables.append_block_ids(0, [[5]], overwrite=True)
    print("works", tables.explain(0, 0, 3).slot)
except BlockTableError as error:
    print(type(error).__name__, "|", error.argument, "|", error.hint)
"""


def test_without_triton_the_cpu_works() -> None:
    script = BUILD.format(device="cpu").replace("print(", "tables.apply_staged_writes(); print(", 1)
    assert run_without("triton", script) == "works 83"


def test_without_triton_or_a_driver_cuda_is_unavailable() -> None:
    error, argument, hint = run_without("triton", BUILD.format(device="cuda")).split(" | ")
    assert error == "BackendUnavailableError"
    assert "cuda" in argument or "device" in argument
    assert hint


def test_without_torch_npu_npu_is_unavailable() -> None:
    out = run_without("torch_npu", BUILD.format(device="npu:0"))
    assert out == f"BackendUnavailableError | device | {ASCEND}"


def test_interpreter_without_triton_is_unavailable() -> None:
    script = BUILD.format(device="cpu")
    out = run_without("triton", script, FUSED_SLOTS_BACKEND="interpreter", TRITON_INTERPRET="1")
    assert out.startswith("BackendUnavailableError | ")
    assert "pip install 'triton>=3.6'" in out


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="needs torch without torch_npu")
def test_npu_without_torch_npu_is_unavailable() -> None:
    with pytest.raises(BackendUnavailableError, match="torch_npu") as raised:
        build(device="npu:1")
    assert raised.value.hint == ASCEND


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_device_is_unavailable() -> None:
    with pytest.raises(BackendUnavailableError):
        build(device="cuda")


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("cuda", "cpu", "expected cuda with the cuda backend; got cpu"),
        ("cpu", "meta", "expected cpu with the cpu backend; got meta"),
        ("interpreter", "meta", "expected cpu with the interpreter backend; got meta"),
        ("", "meta", "expected cpu or .*; got meta"),
    ],
)
def test_backend_that_does_not_serve_the_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, message: str
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", backend)
    with pytest.raises(BackendUnavailableError, match=message) as raised:
        AscendBlockTables.from_groups(
            [PAGED], max_num_reqs=4, max_num_batched_tokens=16, device=device
        )
    assert raised.value.argument == "device"


def test_missing_package_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_backends(), "cpu", Registered("driver:Backend", "cpu"))
    with pytest.raises(BackendUnavailableError, match="No module named 'driver'") as raised:
        build()
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def _backends() -> dict[str, Registered]:
    from fused_slots import backends

    registry: dict[str, Registered] = backends._BACKENDS
    return registry


@pytest.mark.parametrize(
    "refusal",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686016279904256]"),
        MemoryError("Unable to allocate 24.0 GiB"),
    ],
    ids=["cuda", "cpu", "overflow", "numpy"],
)
def test_refused_memory_names_the_sizes(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def allocate(*_: Any) -> torch.Tensor:
        raise refusal

    monkeypatch.setattr(base.Backend, "allocate", allocate)
    with pytest.raises(ConfigurationError) as raised:
        build(max_num_reqs=7, max_num_batched_tokens=33)
    error = raised.value
    assert "max_num_reqs=7, max_num_batched_tokens=33, row widths (8,)" in error.argument
    # Two arenas of 64 elements, 7 row lengths, two buffers of 33 int64 slots.
    assert error.actual == f"{4 * (2 * 64 + 7) + 2 * 8 * 33:,} bytes, which were refused"
    assert "Lower max_num_reqs" in error.hint
    assert error.__cause__ is refusal


def test_sizes_beyond_all_memory_are_refused() -> None:
    """No patch: 35 TB are asked for."""
    group = KVCacheGroup(block_size=16, max_num_blocks=2**22)
    with pytest.raises(ConfigurationError, match="35,184,376,283,392 bytes"):
        MakeTables("cpu")([group], max_num_reqs=2**20)


def test_other_failures_of_a_backend_are_not_called_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate(*_: Any) -> torch.Tensor:
        raise RuntimeError("the kernel did not compile")

    monkeypatch.setattr(base.Backend, "allocate", allocate)
    with pytest.raises(RuntimeError, match="the kernel did not compile"):
        build()


FAILING: dict[str, Callable[[AscendBlockTables], object]] = {
    "apply": lambda tables: tables.apply_staged_writes(),
    "step": lambda tables: tables.step(*batch_tensors(tables, [(0, [0])])),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=FAILING.keys())
def test_a_launch_that_fails_keeps_its_writes_for_the_next(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[AscendBlockTables], object]
) -> None:
    tables = build()
    tables.append_block_ids(0, [[5, 6]], overwrite=True)
    launches = tables.launches

    def fail(*_: Any) -> None:
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(type(tables._backend), "step", fail)
        with pytest.raises(RuntimeError, match="launch failed"):
            call(tables)
    assert tables.launches == launches
    tables.append_block_ids(0, [[7]], overwrite=False)
    call(tables)
    assert tables.launches == launches + 1
    assert gathered(tables, [0])[0][0][:4] == [5, 6, 7, 0]
    assert tables.num_blocks.gpu[0, 0] == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda tables: tables.gather_block_tables(int32(tables, [0]), 1),
        lambda tables: slots(tables, [(0, [0])]),
        lambda tables: tables.map_tokens(*batch_tensors(tables, [(0, [0])])[::2]),
    ],
    ids=["gather", "map_slots", "map_tokens"],
)
def test_a_launch_that_fails_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[AscendBlockTables], object]
) -> None:
    tables = build()
    launches = tables.launches

    def fail(*_: Any) -> None:
        raise RuntimeError("launch failed")

    for operation in ("step", "map_slots", "map_tokens"):
        monkeypatch.setattr(type(tables._backend), operation, fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        call(tables)
    assert tables.launches == launches


@pytest.mark.parametrize("operation", ["apply_staged_writes", "step"])
def test_pending_writes_are_refused_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    tables = build(rows={0: [[5]]})
    arguments = batch_tensors(tables, [(0, [0])]) if operation == "step" else ()

    def refuse(_: Any, operation: str) -> None:
        raise InvalidArgumentError(operation, expected="no pending writes", actual="a capture")

    monkeypatch.setattr(type(tables._backend), "refuse_capture", refuse)
    getattr(tables, operation)(*arguments)  # nothing pending: allowed
    tables.append_block_ids(0, [[]], overwrite=False)
    getattr(tables, operation)(*arguments)  # an append of nothing is not pending either
    tables.append_block_ids(0, [[6]], overwrite=False)
    launches = tables.launches
    with pytest.raises(InvalidArgumentError) as raised:
        getattr(tables, operation)(*arguments)
    assert raised.value.argument == operation
    assert tables.launches == launches
    monkeypatch.undo()
    getattr(tables, operation)(*arguments)
    assert gathered(tables, [0])[0][0][:3] == [5, 6, 0]


@pytest.mark.parametrize(
    "error_type",
    [
        BlockTableError,
        ConfigurationError,
        InvalidArgumentError,
        RowCapacityError,
        BlockIdError,
        BackendUnavailableError,
    ],
)
def test_errors_survive_the_way_to_another_process(error_type: type[BlockTableError]) -> None:
    """Engines run workers in processes; an error that cannot be pickled kills the reader."""
    error = error_type("argument", expected="this", actual="that", hint="do so")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_type
    assert str(copy) == str(error) == "argument: expected this; got that. do so"
    assert (copy.argument, copy.expected, copy.actual, copy.hint) == (
        "argument",
        "this",
        "that",
        "do so",
    )


def test_device_faults_are_counted_and_the_batch_survives() -> None:
    """A wrong row, an unfilled column and a live token in one batch."""
    tables = build(rows={0: [[5]]}, checked=True)
    assert slots(tables, [(9, [0]), (0, [0, 16]), (0, [3])]) == [[-1, 80, -1, 83]]
    records = tables.take_faults()
    assert [(f.code.name, f.count, f.row, f.token, f.position) for f in records] == [
        ("ROW_OUT_OF_RANGE", 1, 9, 0, 0),
        ("COLUMN_OUT_OF_ROW", 1, 0, 2, 16),
    ]
    assert faults(tables) == []


def test_more_faults_than_can_be_detailed() -> None:
    tables = build(rows={0: [[5]]}, checked=True, max_num_batched_tokens=200)
    slots(tables, [(0, range(16, 166)), (9, [0] * 20)])
    records = tables.take_faults()
    assert len(records) == FAULT_DETAILS + 1
    assert all(fault.count == 1 and fault.row >= 0 for fault in records[: FAULT_DETAILS])
    rest = records[-1]
    assert (rest.code.name, rest.row, rest.token, rest.position) == (
        "COLUMN_OUT_OF_ROW",
        -1,
        -1,
        -1,
    )
    assert rest.count == 170 - FAULT_DETAILS
    total = {"COLUMN_OUT_OF_ROW": 0, "ROW_OUT_OF_RANGE": 0}
    for fault in records:
        total[fault.code.name] += fault.count
    assert total == {"COLUMN_OUT_OF_ROW": 150, "ROW_OUT_OF_RANGE": 20}


def test_hiding_a_package_hides_it() -> None:
    """Else the checks above would show nothing."""
    script = "from importlib.util import find_spec\nprint(find_spec('numpy') is not None)"
    assert run_without("numpy", script) == "False"
    assert run_without("nothing", script) == "True"


@pytest.mark.parametrize("checked", [True, False])
def test_checked_mode_refuses_a_second_thread(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    tables = build(rows={0: [[5]]}, checked=checked)
    entered, leave = threading.Event(), threading.Event()
    step = type(tables._backend).step

    def slow(*arguments: Any) -> None:
        entered.set()
        assert leave.wait(20)
        step(*arguments)

    tables.append_block_ids(0, [[6]], overwrite=False)
    monkeypatch.setattr(type(tables._backend), "step", slow)
    thread = threading.Thread(target=tables.apply_staged_writes)
    thread.start()
    assert entered.wait(20)
    refused = []
    for call in (
        lambda: tables.append_block_ids(1, [[7]], overwrite=True),
        lambda: tables.clear_row(0),
        tables.take_faults,
    ):
        try:
            call()
        except InvalidArgumentError as error:
            refused.append(str(error))
    leave.set()
    thread.join()
    assert len(refused) == 3 * checked
    assert all("expected one thread at a time in a manager" in text for text in refused)
    tables.append_block_ids(1, [[8]], overwrite=True)  # afterwards it is free again
    assert tables.num_blocks.np[0].tolist()[:2] == ([2, 1] if checked else [0, 1])


def test_the_guard_of_threads_is_the_same_class_for_callers() -> None:
    tables = build(checked=True)
    assert isinstance(tables, AscendBlockTables)
    assert type(tables) is type(build(checked=True))
    assert type(tables).__name__ == "AscendBlockTables"
    public = {
        name
        for name, value in inspect.getmembers(AscendBlockTables, inspect.isroutine)
        if not name.startswith("_")
    }
    guarded = {name for name in public if name in vars(type(tables))}
    assert public - guarded == {"from_groups"}
    for name in guarded:
        assert getattr(tables, name).__doc__ == getattr(AscendBlockTables, name).__doc__


def test_defaults_of_torch_that_a_caller_set_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host tensors say that they are; a manager may be built and used under any default."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    idx, starts, positions = int32(build(), [0]), int32(build(), [0, 2]), torch.tensor([0, 17])
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float16)
        torch.use_deterministic_algorithms(True)
        with torch.inference_mode(), torch.device("meta"):
            tables = build()
            tables.append_block_ids(0, [[5, 6]], overwrite=True)
            gathered_rows, mapped = tables.step(idx, starts, positions)
            tables.init_block_table_layout_tensors()
            tables.gather_block_tables(idx, 1)
            tables.map_tokens(idx, positions[:1])
            tables.get_dummy_block_tables(1)
            told = str(tables.explain(0, 0, 17))
            assert tables.take_faults() == []
            tables.check_integrity()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)
    assert mapped[0, :2].tolist() == [80, 97]
    assert "slot = 97" in told
    assert gathered_rows[0].device.type == "cpu"
