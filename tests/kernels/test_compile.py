"""Every variant that a plan can choose compiles for GPUs that this machine does not have.

Registers, spilled bytes, shared memory and machine instructions are recorded in recorded/, one file
a release of Triton; a difference fails with the numbers. After a change that is meant, record them
again:

    make record-counts
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables
from fused_slots.backends.launch import Binding, Launch, Launcher, Variant
from tests.kernels.offline import NVIDIA, OfflineLauncher, make_offline
from tests.kernels.resources import CONFIGURATIONS, compiled, moved, record_of_this_triton

GROUPED = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CONFIGURATIONS]
"""What a configuration compiles stays in one process."""


@pytest.fixture(scope="module", params=GROUPED)
def configuration(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=NVIDIA)
def launcher(request: pytest.FixtureRequest, configuration: str) -> OfflineLauncher:
    """All variants of a configuration, compiled for one GPU."""
    return compiled(configuration, request.param)


def test_every_variant_compiles_and_spills_nothing(launcher: OfflineLauncher) -> None:
    assert launcher.machines
    for variant, machine in launcher.machines.items():
        assert machine.spilled_bytes == 0, variant
        assert 0 < machine.registers <= 128, variant
        assert machine.shared_bytes <= 48 * 1024, variant


def test_every_variant_needs_what_is_recorded(
    launcher: OfflineLauncher, configuration: str
) -> None:
    path = record_of_this_triton()
    assert path.exists(), "another release: record its numbers, see above"
    record = json.loads(path.read_text())[launcher.target][configuration]
    found = {str(variant): machine.usage for variant, machine in launcher.machines.items()}
    differences = moved(record, found)
    assert not differences, "\n".join([f"not as in {path.name}; make record-counts", *differences])


def test_every_variant_compiles_for_an_amd_gpu_too(configuration: str) -> None:
    """Nothing launches them there yet (docs/design.md): what whoever brings one starts from."""
    machines = compiled(configuration, "gfx942").machines
    record = json.loads(record_of_this_triton().read_text())
    assert {str(variant) for variant in machines} == record["sm_90"][configuration].keys()
    for variant, machine in machines.items():
        assert machine.spilled_bytes == 0, variant
        assert 0 < machine.registers <= 128, variant
        if variant.kernel == "step_kernel" and not dict(variant.constants)["WHOLE"]:
            assert "s_barrier" in machine.assembly, variant


def test_what_a_program_overwrites_it_has_read_before_a_barrier(launcher: OfflineLauncher) -> None:
    """A tensor smaller than a program lies in all its warps, and one of them stores it.

    Without a barrier between the load and the store of one address, a late warp loads what an
    early one has stored.
    """
    for variant, machine in launcher.machines.items():
        raced = unordered_overwrites(machine.assembly)
        assert not raced, f"{variant}: no bar.sync between load and store of {raced}"


def unordered_overwrites(ptx: str) -> list[str]:
    """Address registers stored to after a load from them without a barrier in between."""
    loaded: set[str] = set()
    raced = []
    for line in ptx.splitlines():
        if "bar.sync" in line or "barrier.sync" in line:
            loaded.clear()
        elif access := re.search(r"\b(ld|st)\.global\S* .*?\[ (%rd\d+) \+ 0 \]", line):
            if access[1] == "ld":
                loaded.add(access[2])
            elif access[2] in loaded:
                raced.append(access[2])
    return raced


def test_a_load_and_store_without_a_barrier_is_seen() -> None:
    load, store = "ld.global.b32 { %r1 }, [ %rd5 + 0 ];", "st.global.b32 [ %rd5 + 0 ], { %r2 };"
    assert unordered_overwrites("\n".join([f"@%p1 {load}", f"\t@%p2 {store}"])) == ["%rd5"]
    assert unordered_overwrites("\n".join([load, "bar.sync 0;", store])) == []
    assert unordered_overwrites("\n".join([store, load])) == []


def test_what_moved_is_named_by_variant_and_number() -> None:
    usage = {"registers": 32, "instructions": 500}
    assert moved({"a": usage}, {"a": usage}) == []
    assert moved({"a": usage}, {"a": {**usage, "registers": 31}}) == ["a: registers 32 -> 31"]
    assert moved({"a": usage}, {"a": {**usage, "instructions": 501}}) == [
        "a: instructions 500 -> 501"
    ]
    assert moved({"a": usage}, {"b": usage}) == ["a: recorded, no longer chosen", "b: not recorded"]


class RecordingLauncher(Launcher):
    """Binds nothing and remembers what a launch asked for."""

    def __init__(self) -> None:
        self.bound: list[Variant] = []
        self.launched: set[Variant] = set()

    def prepare(self, binding: Binding) -> Launch:
        self.compiled += 1
        variant, changing_types = binding.variant, binding.changing_types
        self.bound.append(variant)
        assert len(binding.kernel.arg_names) == len([*binding.types, *variant.constants])

        def launch(programs: int, tensors: Any, numbers: Any) -> None:
            assert programs > 0
            assert len(tensors) + len(numbers) == len(changing_types)
            for tensor, type_ in zip(tensors, changing_types, strict=False):
                assert type_ == {torch.int32: "*i32", torch.int64: "*i64"}[tensor.dtype]
            self.launched.add(variant)

        return launch


@pytest.mark.parametrize("plan", ["auto", "by_request"])
def test_a_thousand_shapes_choose_nothing_that_warmup_did_not_bind(
    configuration: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_SLOTS_PLAN", plan)
    settings = {**CONFIGURATIONS[configuration], "max_num_reqs": 300}
    settings["max_num_batched_tokens"] = 5000
    tables = make_offline(RecordingLauncher, **settings)
    launcher = tables._backend.launcher
    warmed = set(tables.warmup().variants)
    assert {str(variant) for variant in launcher.bound} == warmed
    assert launcher.launched == set(launcher.bound), "each is tried once"
    launcher.launched.clear()
    bound = launcher.compiled
    rng = Random(configuration)
    for _ in range(1000):
        call_with_random_shapes(tables, rng)
    assert launcher.compiled == bound
    assert {str(variant) for variant in launcher.launched} <= warmed
    # Nearly all that is warmed up is also used: the list is no longer than it has to be.
    assert {str(variant) for variant in launcher.launched} == warmed


def call_with_random_shapes(tables: AscendBlockTables, rng: Random) -> None:
    """One call of any kind; sizes, dtypes and optional arguments as they come."""
    num_reqs = rng.choice((0, 1, 2, rng.randint(0, 300)))
    capacity = rng.choice((1, 16, 17, 5000))
    num_tokens = rng.choice((0, 1, capacity, rng.randint(0, capacity)))
    index = rng.choice((torch.int32, torch.int64))
    idx = torch.zeros(num_reqs, dtype=index)
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    replay = rng.choice((None, torch.zeros(num_reqs, dtype=torch.int32)))
    length = None if replay is None else rng.choice((None, replay))
    computed = rng.choice((None, torch.zeros(300, dtype=torch.int32)))
    groups = tables.layout.num_groups
    out = torch.zeros((groups, capacity), dtype=rng.choice((torch.int32, torch.int64)))
    kind = rng.randrange(6)
    if kind == 0:
        replayed = {"replay_start": replay, "replay_len": length}
        tables.compute_slot_mappings(idx, starts, positions, num_tokens, **replayed)
    elif kind == 1:
        tables.compute_slot_mappings(idx, starts, positions, num_tokens, out, replay, length)
    elif kind == 2:
        rows = torch.zeros(num_tokens, dtype=index)
        tables.map_tokens(rows, positions, rng.choice((None, out)))
    elif kind == 3:
        tables.gather_block_tables(idx, rng.randint(num_reqs, 300), num_computed_tokens=computed)
    elif kind == 4:
        widths = tables.layout.widths
        own = [torch.zeros((num_reqs, width), dtype=torch.int32) for width in widths]
        tables.gather_block_tables(idx, num_reqs, out=own, num_computed_tokens=computed)
    else:
        for row in range(rng.choice((0, 1, 9, 40))):
            tables.append_block_ids(row, [[1]] * groups, overwrite=True)
        replayed = {"replay_start": replay, "replay_len": length}
        tables.step(idx, starts, positions, num_computed_tokens=computed, **replayed)
