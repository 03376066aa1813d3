"""The Ascend backend against a fake of the calls it makes to torch_npu and triton-ascend.

The fake keeps tensors in host memory and checks what a launcher gets: grid, stream and arguments
of the declared types. What kernels compute is tested where they are executed (tests/ascend) and
interpreted (tests/kernels/interpreted).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fused_slots import (
    AscendBlockTables,
    BlockTableError,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
)
from fused_slots.backends.ascend import plan
from fused_slots.backends.ascend.device import AscendBackend
from fused_slots.faults import (
    BackendUnavailableError,
    ConfigurationError,
    InvalidArgumentError,
)

ROOT = Path(__file__).parents[2]
PAGED = KVCacheGroup(16, 8)
STREAM = 4711
INT_RANGES = {"i32": 2**31, "i64": 2**63}


class FakeEvent:
    """torch.npu.Event: recorded on the current stream, waited for by the host."""

    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu

    def record(self) -> None:
        self._npu.log.append("record")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._npu.log.append("wait")


class FakeNpu:
    """torch.npu with two devices; log holds what was asked of it, in order."""

    def __init__(self) -> None:
        self.available, self.current, self.capturing = True, 0, False
        self.log: list[str] = []
        self.launches: list[SimpleNamespace] = []
        self.tried: list[SimpleNamespace] = []
        self.compiled: list[Any] = []
        self.options = {"multibuffer"}
        self.compile_only = False
        self.exit_codes: list[int] = []
        """How the compiler ends first, before it does its work."""

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"synchronize {device.index}")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def get_current_stream(self, index: int) -> int:
        assert index == self.current, "the stream of a device that is not current"
        return STREAM + index

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": 1, "num_aicore": 20, "num_vectorcore": 40}

    def compile(self, source: Any, target: Any = None, options: Any = None) -> Any:
        assert not self.capturing
        assert options == {"multibuffer": False}
        if self.exit_codes:
            try:
                raise subprocess.CalledProcessError(self.exit_codes.pop(0), "triton-adapter-opt")
            except subprocess.CalledProcessError:
                raise RuntimeError("MLIRCompilationError")  # noqa: B904 (as triton-ascend does)
        taken = {name: value for name, value in options.items() if name in self.options}
        kernel = _FakeCompiled(self, source, taken)
        self.compiled.append(kernel)
        return kernel


class _FakeSource:
    """triton-ascend 3.2's ASTSource: the signature names runtime arguments, constants the rest."""

    def __init__(self, fn: Any, signature: Any, constants: Any = None, attrs: Any = None) -> None:
        assert [*signature, *constants] == fn.arg_names
        self.fn, self.signature, self.constants = fn, signature, constants


class _FakeLaunch:
    """triton-ascend 3.2's NPULauncher."""

    def __init__(self, run: Callable[..., None], compile_only: bool) -> None:
        self._run, self.compile_only = run, compile_only

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)


class _FakeCompiled:
    """triton-ascend 3.2's CompiledKernel: `run` exists once handles are initialised."""

    def __init__(self, npu: FakeNpu, source: _FakeSource, options: dict[str, bool]) -> None:
        self._npu, self.src = npu, source
        self.metadata = SimpleNamespace(**options)
        self.packed_metadata = {"kernel_name": source.fn.__name__}
        self.function: object | None = None
        self.launched = False

    def _init_handles(self) -> None:
        self.function = object()
        self.run = _FakeLaunch(self._run, self._npu.compile_only)

    def _run(self, x: int, y: int, z: int, stream: int, function: object, metadata: object,
             launch_metadata: None, enter: None, leave: None, *arguments: Any) -> None:  # fmt: skip
        assert (y, z) == (1, 1)
        assert 0 < x <= plan.MAX_GRID
        assert function is self.function
        assert metadata is self.packed_metadata
        assert stream == STREAM + self._npu.current
        named = dict(zip(self.src.signature, arguments, strict=True))
        for name, type_ in self.src.signature.items():
            value = named[name]
            if type_.startswith("*"):
                assert f"i{value.element_size() * 8}" == type_[1:], name
            else:
                assert type(value) is int, name
                assert -INT_RANGES[type_] <= value < INT_RANGES[type_], name
        launch = SimpleNamespace(kernel=self.src.fn.__name__, programs=x, **named)
        # The first launch of a kernel is the one on nothing.
        (self._npu.launches if self.launched else self._npu.tried).append(launch)
        self.launched = True


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    """torch_npu and triton-ascend as the backend sees them; npu tensors lie in host memory."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.compiler")
    pytest.importorskip("triton.runtime")
    fake = FakeNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    module = ModuleType("triton.backends.ascend")
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    active = SimpleNamespace(utils=fake, get_current_stream=fake.get_current_stream)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton, "compile", fake.compile)
    monkeypatch.setattr(triton.compiler, "ASTSource", _FakeSource)
    monkeypatch.setattr("fused_slots.block_tables.parse_device", _host_device)
    monkeypatch.setattr(
        "fused_slots.block_tables.backend_class", lambda device: AscendBackend
    )
    return fake


def _host_device(device: str | torch.device) -> torch.device:
    return torch.device(str(device).replace("npu", "cpu"))


def make(groups: list[KVCacheGroup] | None = None, **settings: Any) -> AscendBlockTables:
    sizes = {"max_num_reqs": 8, "max_num_batched_tokens": 64, "device": "npu"}
    return AscendBlockTables.from_groups(groups or [PAGED], **{**sizes, **settings})


def batch(num_reqs: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.arange(num_reqs, dtype=torch.int32),
        torch.arange(num_reqs + 1, dtype=torch.int32),
        torch.zeros(num_reqs, dtype=torch.int64),
    )


def planes(launch: SimpleNamespace) -> list[list[int]]:
    """Starts, lengths and bases of the rows of one group."""
    rows = launch.max_num_reqs
    return list(launch.starts_ptr[: 3 * rows].view(3, rows).tolist())


def staged_ids(launch: SimpleNamespace, row: int, begin: int, end: int) -> list[int]:
    """The ids of columns [begin, end) of a row that a launch of one group writes."""
    base = planes(launch)[2][row]
    return list(launch.starts_ptr[launch.plane :][base + begin : base + end].tolist())


def test_slots_are_int32_unless_asked_for(npu: FakeNpu) -> None:
    assert make().slot_mappings.dtype == torch.int32
    assert make(slot_dtype=torch.int64, num_blocks=100).slot_mappings.dtype == torch.int64


def test_a_step_is_one_launch_on_the_current_stream(npu: FakeNpu) -> None:
    tables = make()
    tables.append_block_ids(1, ([5, 6],), overwrite=True)
    tables.step(*batch())
    (launch,) = npu.launches
    assert launch.kernel == "step_on_ascend"
    assert (launch.num_written_rows, launch.num_reqs, launch.num_entries) == (1, 2, 2)
    assert launch.written_rows_ptr.tolist() == [1]
    assert planes(launch)[:2] == [[0] * 8, [0, 2, *[0] * 6]]
    assert staged_ids(launch, 1, 0, 2) == [5, 6]
    assert tables.launches == 1


@pytest.mark.parametrize("defaults", [lambda: torch.device("meta"), torch.inference_mode])
def test_memory_of_the_host_is_there_whatever_a_caller_has_set(
    npu: FakeNpu, defaults: Callable[[], AbstractContextManager[Any]]
) -> None:
    idx_mapping, query_start_loc, positions = batch()
    with defaults():
        tables = make()
        tables.append_block_ids(1, ([5, 6],), overwrite=True)
        tables.step(idx_mapping, query_start_loc, positions)
    tables.append_block_ids(1, ([7],), overwrite=False)
    out = [torch.zeros_like(table) for table in tables.input_block_tables]
    with defaults():
        tables.gather_block_tables(idx_mapping, 2, out=out)
    tables.init_block_table_layout_tensors()
    tables.step(idx_mapping, query_start_loc, positions)
    kept = list(tables._backend._out_tables.values())
    assert {tensor.device.type for tensor in [tables.slot_mappings, *kept]} == {"cpu"}
    assert staged_ids(npu.launches[0], 1, 0, 2) == [5, 6]


def test_packets_hold_the_lengths_of_rows_written_before(npu: FakeNpu) -> None:
    tables = make()
    tables.append_block_ids(1, ([5, 6],), overwrite=True)
    tables.apply_staged_writes()
    tables.append_block_ids(1, ([7],), overwrite=False)
    tables.append_block_ids(3, ([8],), overwrite=True)
    tables.apply_staged_writes()
    launch = npu.launches[-1]
    assert planes(launch)[:2] == [[0, 2, *[0] * 6], [0, 3, 0, 1, 0, 0, 0, 0]]
    assert staged_ids(launch, 1, 2, 3) == [7]
    assert staged_ids(launch, 3, 0, 1) == [8]
    assert launch.generations_ptr.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_a_ring_of_packets_waits_for_the_device(npu: FakeNpu) -> None:
    tables = make()
    for _ in range(200):
        tables.append_block_ids(1, ([5],), overwrite=True)
        tables.apply_staged_writes()
    assert "wait" in npu.log
    assert npu.log.index("record") < npu.log.index("wait")
    assert len(npu.launches) == 200


def test_nothing_compiles_after_warmup(npu: FakeNpu) -> None:
    groups = [PAGED, KVCacheGroup(8, 1, circular=True, prefix_cacheable=False)]
    tables = make(groups, replay_window=4, max_num_batched_tokens=4096)
    report = tables.warmup()
    assert len(report.variants) == len(set(report.variants)) == tables._backend.launcher.compiled
    assert len(npu.tried) == len(report.variants)
    assert all(launch.programs == 2 and launch.capacity == 0 for launch in npu.tried)
    assert npu.launches == []
    index, starts, positions = batch()
    for idx in (index, index.long()):
        for out in (None, torch.zeros(2, 64, dtype=torch.int64)):
            for replay in (None, torch.zeros(2, dtype=torch.int32)):
                for tokens in (2, 64):
                    tables.compute_slot_mappings(
                        idx, starts, positions, tokens, out=out, replay_start=replay
                    )
            tables.map_tokens(idx, positions, out=out)
        for tokens in (2, 64):
            tables.step(idx, starts, positions, num_tokens_padded=tokens, replay_start=None)
        tables.gather_block_tables(idx, 2)
        tables.gather_block_tables(idx, 2, out=[torch.zeros_like(t) for t in
                                                tables.input_block_tables])  # fmt: skip
    assert len(npu.compiled) == len(report.variants)


def test_the_grid_stays_within_the_runtime_limit(npu: FakeNpu) -> None:
    tables = make([PAGED] * 3000, max_num_reqs=2, max_num_batched_tokens=4096)
    tables.compute_slot_mappings(*batch(), 4096)
    assert npu.launches[-1].programs <= plan.MAX_GRID
    with pytest.raises(ConfigurationError, match="65535 programs"):
        make([PAGED] * (plan.MAX_GROUPS + 1), max_num_reqs=1)


@pytest.mark.parametrize("num_groups", [1, 7, 40, 500])
@pytest.mark.parametrize("cores", [1, 40, 64])
def test_plans_give_each_role_a_program_and_no_more_than_the_cores(
    num_groups: int, cores: int
) -> None:
    for pieces in (1, 10, 10**9):
        planned = plan.plan_launch(
            num_groups, cores, runs=False, capacity=pieces, num_tokens=pieces // 2,
            num_entries=pieces, num_written_rows=pieces,
        )  # fmt: skip
        roles = (planned.num_tiles, planned.num_pad, planned.num_gather, planned.num_write)
        assert all(1 <= role <= max(cores // num_groups, 1) for role in roles)
        assert num_groups * planned.programs <= plan.MAX_GRID


def test_a_launch_of_runs_takes_no_more_programs_than_there_are_cores() -> None:
    for num_groups, tokens in ((6, 4096), (4, 8192), (12, 8192)):
        for capacity in (tokens, tokens + 500):
            planned = plan.plan_launch(
                num_groups, 48, runs=True, capacity=capacity, num_tokens=tokens, num_entries=1
            )
            assert num_groups * planned.programs <= 48
            assert (planned.num_pad > 0) == (capacity > tokens)


def test_plans_of_short_and_long_queries(npu: FakeNpu) -> None:
    tables = make(max_num_batched_tokens=8192, max_num_reqs=256)
    assert "runs" not in tables.launch_plan(256, 256).variant
    assert "runs" in tables.launch_plan(1, 4096).variant
    assert "short" in tables.launch_plan(256, 256).describe()
    assert "long" in tables.launch_plan(1, 4096).describe()
    sharded = make(max_num_batched_tokens=8192, context_parallel=ContextParallel(2, 1))
    assert "runs-pow2-sharded" in sharded.launch_plan(1, 4096).variant


def test_another_device_is_made_current_for_a_launch(npu: FakeNpu) -> None:
    tables = make(device="npu:1")
    assert npu.current == 0
    tables.compute_slot_mappings(*batch(), 2)
    assert npu.current == 0
    assert len(npu.launches) == 1


def test_captures_refuse_staged_writes_and_compilation(npu: FakeNpu) -> None:
    tables = make()
    tables.warmup()
    tables.append_block_ids(0, ([5],), overwrite=True)
    npu.capturing = True
    for call in (tables.apply_staged_writes, lambda: tables.step(*batch())):
        with pytest.raises(InvalidArgumentError, match="capture in progress"):
            call()
    tables.compute_slot_mappings(*batch(), 2)
    with pytest.raises(InvalidArgumentError, match="compiling slots_on_ascend"):
        make().compute_slot_mappings(*batch(), 2)


def test_rows_that_a_captured_step_fills_again_are_brought_up_to_date(npu: FakeNpu) -> None:
    tables = make()
    tables.warmup()
    npu.capturing = True
    tables.step(*batch(5))
    npu.capturing = False
    for _ in range(2):
        tables.step(*batch(2))
        assert npu.launches[-1].num_entries == 5


def test_rows_stay_dirty_while_a_capture_runs_nothing(npu: FakeNpu) -> None:
    tables = make()
    tables.warmup()
    tables.step(*batch(5))
    npu.capturing = True
    tables.step(*batch(2))
    npu.capturing = False
    tables.step(*batch(1))
    assert npu.launches[-1].num_entries == 5


def test_tables_that_a_capture_names_are_kept(npu: FakeNpu) -> None:
    tables = make()
    rows = torch.zeros(1, dtype=torch.int32)
    outs = [[torch.zeros(1, width, dtype=torch.int32)] for width in range(128, 228)]
    tables.gather_block_tables(rows, 1, out=outs[0])
    npu.capturing = True
    tables.gather_block_tables(rows, 1, out=outs[0])
    captured = npu.launches[-1].gathered_lines_ptr
    with pytest.raises(InvalidArgumentError, match="first gather into these out tables"):
        tables.gather_block_tables(rows, 1, out=outs[1])
    npu.capturing = False
    for out in outs[1:]:
        tables.gather_block_tables(rows, 1, out=out)
    tables.gather_block_tables(rows, 1, out=outs[0])
    assert npu.launches[-1].gathered_lines_ptr is captured


def test_tables_of_callers_are_not_kept_for_ever(npu: FakeNpu) -> None:
    tables = make()
    for width in range(128, 128 + 100):
        out = [torch.zeros(1, width, dtype=torch.int32)]
        tables.gather_block_tables(torch.zeros(1, dtype=torch.int32), 1, out=out)
        assert npu.launches[-1].gathered_lines_ptr.tolist() == [0, width, width]
    assert len(tables._backend._out_tables) <= 64


def test_faults_are_counted_in_int32_and_reported_once(npu: FakeNpu) -> None:
    tables = make()
    tables._backend._faults[1, 0] = 3
    (fault,) = tables.take_faults()
    assert (fault.code.name, fault.count) == ("COLUMN_OUT_OF_ROW", 3)
    assert tables.take_faults() == []
    assert npu.log == ["synchronize 0"] * 2


def test_dummy_tables_are_written_anew_by_the_next_gather(npu: FakeNpu) -> None:
    tables = make()
    assert not tables.get_dummy_block_tables(3)[0].any()
    states = tables._backend._entry_states[0]
    assert (states[0] == -2).all()
    assert (states[2] == tables.layout.widths[0]).all()
    tables.gather_block_tables(torch.zeros(1, dtype=torch.int32), 1)
    assert npu.launches[-1].num_entries == 3


def test_other_tables_are_found_from_the_lowest(npu: FakeNpu) -> None:
    tables = make([PAGED, PAGED])
    whole = torch.zeros(2, 4, 128, dtype=torch.int32)
    tables.gather_block_tables(torch.zeros(2, dtype=torch.int32), 4, out=[whole[1], whole[0]])
    launch = npu.launches[-1]
    assert launch.gathered_ptr.data_ptr() == whole.data_ptr()
    assert launch.gathered_lines_ptr.tolist() == [512, 128, 128, 0, 128, 128]


def test_an_empty_gather_launches_nothing(npu: FakeNpu) -> None:
    make().gather_block_tables(torch.zeros(0, dtype=torch.int32), 0)
    assert npu.launches == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot_dtype": torch.int64}, "an unknown pool"),
        ({"slot_dtype": torch.int64, "num_blocks": 2**27 + 1}, r"134217729 x 16 = 2147483664"),
    ],
)
def test_slots_beyond_int32_are_refused(
    npu: FakeNpu, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**settings)


def test_a_pool_that_grows_beyond_int32_slots_is_refused(npu: FakeNpu) -> None:
    tables = make(slot_dtype=torch.int64, num_blocks=2**27)
    for larger in (2**27 + 1, None):
        with pytest.raises(ConfigurationError, match="kernels on Ascend compute slots in int32"):
            tables.resize_pools(larger)
    assert tables.layout.num_blocks == (2**27,) * tables.layout.num_groups


def test_a_launch_that_fails_names_the_release_for_this_device(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_FakeCompiled, "_run", lambda self: None)
    with pytest.raises(BackendUnavailableError, match=r"triton-ascend 3\.2\.0 is known to; device"):
        make().warmup()


def test_tables_beyond_int32_are_refused() -> None:
    from fused_slots.backends.ascend.operations import check_int32_slots
    from fused_slots.layout import TableLayout

    layout = TableLayout(
        (KVCacheGroup(16, 2**21),), (2**21,), 1024, 8, ContextParallel(), 0, torch.int32, (None,)
    )
    with pytest.raises(ConfigurationError, match="1024 x 2097152 = 2147483648"):
        check_int32_slots(layout)


def test_state_groups_may_have_unknown_pools(npu: FakeNpu) -> None:
    state = KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE)
    make([state], slot_dtype=torch.int64)


def _without_torch_npu(npu: FakeNpu, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch_npu", None)


def _without_triton_ascend(npu: FakeNpu, patch: pytest.MonkeyPatch) -> None:
    patch.delitem(sys.modules, "triton.backends.ascend")


def _without_npu(npu: FakeNpu, patch: pytest.MonkeyPatch) -> None:
    npu.available = False


def _nothing(npu: FakeNpu, patch: pytest.MonkeyPatch) -> None:
    """The device itself is wrong."""


@pytest.mark.parametrize(
    ("remove", "device", "message"),
    [
        (_without_torch_npu, "npu", "torch_npu does not import"),
        (_without_triton_ascend, "npu", "without triton-ascend"),
        (_without_npu, "npu", "sees no NPU"),
        (_nothing, "npu:2", r"of npu:0 \.\.\. npu:1"),
    ],
)
def test_what_is_missing_is_one_clear_error(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch, remove: Any, device: str, message: str
) -> None:
    remove(npu, monkeypatch)
    with pytest.raises(BackendUnavailableError, match=message) as raised:
        make(device=device)
    assert "triton-ascend" in raised.value.hint
    assert isinstance(raised.value, BlockTableError)


def test_an_option_that_the_compiler_drops_is_an_error(npu: FakeNpu) -> None:
    npu.options.discard("multibuffer")
    with pytest.raises(BackendUnavailableError, match="multibuffer': None") as raised:
        make().step(*batch())
    assert "3.2.0" in raised.value.hint


def test_a_compiler_that_crashes_is_asked_again(
    npu: FakeNpu, caplog: pytest.LogCaptureFixture
) -> None:
    tables = make()
    npu.exit_codes = [-11] * 7
    tables.compute_slot_mappings(*batch(), 2)
    assert len(npu.compiled) == 1
    assert "signal 11" in caplog.text
    assert "attempt 8 of 8" in caplog.text


@pytest.mark.parametrize(("exit_codes", "left"), [([1, 0], 1), ([-11] * 9, 1)])
def test_what_the_compiler_refuses_or_never_survives_is_an_error(
    npu: FakeNpu, exit_codes: list[int], left: int
) -> None:
    tables = make()
    npu.exit_codes = exit_codes
    with pytest.raises(RuntimeError, match="MLIRCompilationError"):
        tables.compute_slot_mappings(*batch(), 2)
    assert len(npu.exit_codes) == left
    assert npu.compiled == []


def test_launches_that_run_nothing_are_an_error(npu: FakeNpu) -> None:
    npu.compile_only = True
    with pytest.raises(BackendUnavailableError, match="TRITON_COMPILE_ONLY"):
        make().compute_slot_mappings(*batch(), 2)


TEACHES = 'import torch; torch.utils.rename_privateuse1_backend("npu")'
FAILS = "raise ImportError('libhccl.so: cannot open shared object file')"
PARSES = """
from fused_slots.backends import parse_device
from fused_slots.faults import BackendUnavailableError
try:
    print(parse_device("npu:1"))
except BackendUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("installed", "said", "unsaid"),
    [
        (TEACHES, "npu:1", "does not import"),
        (FAILS, "set_env.sh", "pip install"),
        ("raise RuntimeError('no CANN')", "set_env.sh", "pip install"),
        (None, "pip install torch-npu", "set_env.sh"),
    ],
)
def test_torch_npu_is_imported_where_torch_has_not_done_so(
    tmp_path: Path, installed: str | None, said: str, unsaid: str
) -> None:
    if installed:
        (tmp_path / "torch_npu.py").write_text(installed)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    variables = os.environ | {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PARSES]
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert said in done.stdout
    assert unsaid not in done.stdout
