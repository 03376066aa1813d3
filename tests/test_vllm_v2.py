"""The v2 stand-in without vllm: whatever waits, every call sees what it would have seen."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from random import Random
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, BlockTableError
from fused_slots.vllm.v2 import FusedAscendBlockTables, FusedBlockTables

NUM_ROWS, CAPACITY = 4, 24
SIZES: dict[str, Any] = {
    "block_sizes": [4, 8, 64],
    "max_num_reqs": NUM_ROWS,
    "max_num_batched_tokens": CAPACITY,
    "max_num_blocks_per_group": [8, 4, 2],
    "device": torch.device("cpu"),
    "slot_mapping_enabled": [True, True, False],
    "dcp_sharded": [True, True, False],
    "sliding_window_reach": [0, 9, 0],
    "cp_size": 1,
    "cp_rank": 0,
    "cp_interleave": 1,
}


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def state(tables: AscendBlockTables) -> list[list[Any]]:
    """Everything that vLLM's kernels may read."""
    return [
        *(table.gpu.tolist() for table in tables.block_tables),
        *(table.tolist() for table in tables.input_block_tables),
        tables.num_blocks.gpu.tolist(),
        tables.slot_mappings.tolist(),
    ]


def append(rng: Random) -> Any:
    row, overwrite = rng.randrange(NUM_ROWS), rng.random() < 0.4
    ids = [[rng.randrange(1, 99) for _ in range(rng.randrange(2))] for _ in range(3)]
    return lambda t: t.append_block_ids(row, ids, overwrite=overwrite)


def apply(rng: Random) -> Any:
    return lambda t: t.apply_staged_writes()


class Batch:
    """Arguments that a gather and the slot mapping after it share, as the runner's do."""

    def __init__(self, rng: Random) -> None:
        rows = rng.sample(range(NUM_ROWS), rng.randint(0, NUM_ROWS))
        lengths = [rng.randint(0, 4) for _ in rows]
        self.idx_mapping = longs(rows)
        self.query_start_loc = ints([sum(lengths[:b]) for b in range(len(rows) + 1)])
        self.positions = longs([rng.randrange(40) for _ in range(sum(lengths))])
        self.padded = rng.randint(len(rows), NUM_ROWS)
        self.computed = ints([rng.randrange(40) for _ in range(NUM_ROWS)])

    def gather(self, tables: Any) -> None:
        tables.gather_block_tables(self.idx_mapping, self.padded, num_computed_tokens=self.computed)

    def compute(self, tables: Any) -> None:
        tables.compute_slot_mappings(
            self.idx_mapping, self.query_start_loc, self.positions, CAPACITY
        )


def gather(rng: Random) -> Any:
    return Batch(rng).gather


def compute(rng: Random) -> Any:
    return Batch(rng).compute


def gather_and_compute(rng: Random) -> Any:
    batch = Batch(rng)

    def both(tables: Any) -> None:
        batch.gather(tables)
        batch.compute(tables)

    return both


def gather_into_out(rng: Random) -> Any:
    batch = Batch(rng)

    def call(tables: Any) -> list[Any]:
        out = tuple(
            torch.full((2 * NUM_ROWS, t.shape[1]), 7, dtype=torch.int32)
            for t in tables.input_block_tables
        )
        ptrs = torch.tensor([table.data_ptr() for table in out], dtype=torch.uint64)
        tables.gather_block_tables(batch.idx_mapping, batch.padded, out=out, out_ptrs=ptrs)
        return [table.tolist() for table in out]

    return call


def compute_into_out(rng: Random) -> Any:
    batch = Batch(rng)

    def call(tables: Any) -> Any:
        out = torch.full((3, CAPACITY + 9), 7, dtype=torch.int64)
        tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, 1, out=out
        )
        return out.tolist()

    return call


def step(rng: Random) -> Any:
    batch = Batch(rng)
    return lambda t: t.step(batch.idx_mapping, batch.query_start_loc, batch.positions) and None


def map_tokens(rng: Random) -> Any:
    rows, positions = ints([0, 1, 3, -1]), longs([rng.randrange(40) for _ in range(4)])
    return lambda t: t.map_tokens(rows, positions).tolist()


def dummy_tables(rng: Random) -> Any:
    count = rng.randint(0, NUM_ROWS)

    def call(tables: Any) -> None:
        for table in tables.get_dummy_block_tables(count):
            table[:, 0] = 5

    return call


def write(rng: Random) -> Any:
    row, first = rng.randrange(NUM_ROWS), [rng.randrange(3) for _ in range(3)]
    ids = [[rng.randrange(1, 30)] * rng.randrange(2) for _ in range(3)]
    return lambda t: t.write_block_ids(row, first, ids)


def clear(rng: Random) -> Any:
    row = rng.randrange(NUM_ROWS)
    return lambda t: t.clear_row(row)


def write_into_gathered(rng: Random) -> Any:
    """Callers' cells stay until the next gather that is whole."""
    value = rng.randrange(1, 30)

    def call(tables: Any) -> None:
        tables.invalidate_gathered()
        for table in tables.input_block_tables:
            table.fill_(value)

    return call


CALLS = (
    append,
    append,
    apply,
    apply,
    gather,
    compute,
    gather_and_compute,
    gather_into_out,
    compute_into_out,
    step,
    map_tokens,
    dummy_tables,
    write,
    clear,
    write_into_gathered,
    lambda rng: lambda t: t.get_dummy_slot_mappings(3).tolist(),
    lambda rng: lambda t: t.take_faults(),
    lambda rng: lambda t: str(t.explain(0, 1, 5)),
    lambda rng: lambda t: t.init_block_table_layout_tensors(),
    lambda rng: lambda t: t.warmup().variants,
    lambda rng: lambda t: t.check_integrity(),
    lambda rng: lambda t: t.resize_pools(None),
)


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_calls_gives_what_the_undeferred_manager_gives(seed: int) -> None:
    rng = Random(seed)
    fused, plain = FusedBlockTables(**SIZES), AscendBlockTables(**SIZES)
    for _ in range(40):
        with ExitStack() as scope:
            if rng.random() < 0.8:
                scope.enter_context(fused.defer_writes())
            if rng.random() < 0.6:
                scope.enter_context(fused.fuse_gather())
            for _ in range(rng.randint(1, 6)):
                call = rng.choice(CALLS)(rng)
                assert outcome(call, fused) == outcome(call, plain)
        assert state(fused) == state(plain)
        assert (fused.num_blocks.np == plain.num_blocks.np).all()


def outcome(call: Any, tables: Any) -> Any:
    """What a call gives, or the error that it raises (a full row, an aliased slot)."""
    try:
        return call(tables)
    except BlockTableError as error:
        return str(error)


def launched(tables: Any, *calls: Any) -> int:
    before = tables.launches
    for call in calls:
        call(tables)
    return int(tables.launches - before)


def test_inside_the_runner_a_step_with_writes_is_one_launch() -> None:
    tables = FusedBlockTables(**SIZES)
    batch = Batch(Random(1))

    def execute_model(tables: Any) -> None:
        with tables.defer_writes():
            tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
            tables.apply_staged_writes()
            with tables.fuse_gather():
                batch.gather(tables)
                batch.compute(tables)

    assert launched(tables, execute_model) == 1
    assert tables.block_tables[0].gpu[1, 0] == 3


def test_outside_the_runner_nothing_waits() -> None:
    tables = FusedBlockTables(**SIZES)
    batch = Batch(Random(1))
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    assert launched(tables, lambda t: t.apply_staged_writes()) == 1
    assert launched(tables, batch.gather) == 1
    assert launched(tables, batch.compute) == 1


@pytest.mark.parametrize("gathers_into", ["the shared tables", "out"])
def test_a_step_called_one_by_one_is_two_launches(gathers_into: str) -> None:
    tables, plain = FusedBlockTables(**SIZES), AscendBlockTables(**SIZES)
    batch = Batch(Random(1))
    call = batch.gather if gathers_into == "the shared tables" else gather_into_out(Random(1))
    for each in (tables, plain):
        each.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    with tables.defer_writes():
        assert launched(tables, lambda t: t.apply_staged_writes()) == 0
        assert launched(tables, call) == 1
        assert launched(tables, batch.compute) == 1
    assert launched(plain, lambda t: t.apply_staged_writes(), call, batch.compute) == 3
    assert state(tables) == state(plain)
    assert tables.block_tables[0].gpu[1, 0] == 3


def test_slots_for_the_callers_own_buffer_are_a_launch_of_their_own() -> None:
    tables, plain = FusedBlockTables(**SIZES), AscendBlockTables(**SIZES)
    batch = Batch(Random(1))
    outs = [torch.full((3, CAPACITY), 7) for _ in range(2)]

    def compute(out: torch.Tensor) -> Any:
        arguments = batch.idx_mapping, batch.query_start_loc, batch.positions, CAPACITY
        return lambda t: t.compute_slot_mappings(*arguments, out=out)

    with tables.fuse_gather():
        assert launched(tables, batch.gather, compute(outs[0])) == 2
    assert launched(plain, batch.gather, compute(outs[1])) == 2
    assert torch.equal(*outs)
    assert state(tables) == state(plain)


def test_a_gather_that_waits_takes_the_waiting_writes_into_its_launch() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    with tables.defer_writes(), tables.fuse_gather():
        tables.apply_staged_writes()
        Batch(Random(1)).gather(tables)
        assert launched(tables, lambda t: t.take_faults()) == 1
    assert tables.block_tables[0].gpu[1, 0] == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_refused_gather_leaves_no_write_waiting(fused: bool) -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)

    def prepare() -> None:
        with tables.defer_writes(), tables.fuse_gather() if fused else nullcontext():
            tables.apply_staged_writes()
            tables.gather_block_tables(longs([1]), NUM_ROWS + 1)

    with pytest.raises(BlockTableError):
        prepare()
    assert tables.block_tables[0].gpu[1, 0] == 3


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_reqs_padded": NUM_ROWS + 1}, "num_reqs_padded"),
        ({"idx_mapping": torch.tensor([1.0])}, "idx_mapping"),
        ({"num_computed_tokens": torch.tensor([1])}, "num_computed_tokens"),
        ({"out_ptrs": torch.zeros(1, dtype=torch.uint64)}, "out"),
    ],
)
def test_a_gather_that_may_wait_is_checked_when_it_is_called(
    wrong: dict[str, Any], named: str
) -> None:
    tables = FusedBlockTables(**SIZES)
    with tables.fuse_gather():
        with pytest.raises(BlockTableError, match=named):
            tables.gather_block_tables(**{"idx_mapping": longs([1]), "num_reqs_padded": 1} | wrong)
        assert launched(tables, lambda t: t.take_faults()) == 0, "nothing waits"


def test_a_gather_of_no_rows_applies_the_waiting_writes() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    out = tuple(table.clone() for table in tables.input_block_tables)
    with tables.defer_writes():
        tables.apply_staged_writes()
        tables.gather_block_tables(longs([]), 0, out=out)
        assert tables.block_tables[0].gpu[1, 0] == 3


def test_an_early_return_leaves_no_write_waiting() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    with tables.defer_writes():
        tables.apply_staged_writes()
        assert tables.block_tables[0].gpu[1, 0] == 0
    assert tables.block_tables[0].gpu[1, 0] == 3


def test_an_error_in_the_runner_leaves_no_write_waiting() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)

    def execute_model() -> None:
        with tables.defer_writes():
            tables.apply_staged_writes()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        execute_model()
    assert tables.block_tables[0].gpu[1, 0] == 3


def test_writes_staged_but_not_applied_stay_invisible_to_a_fused_step() -> None:
    tables = FusedBlockTables(**SIZES)
    idx_mapping = longs([1])
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    with tables.defer_writes(), tables.fuse_gather():
        tables.gather_block_tables(idx_mapping, 1)
        slots = tables.compute_slot_mappings(idx_mapping, ints([0, 1]), longs([0]), 1)
    assert slots[0].tolist() == [-1]
    assert tables.input_block_tables[0][0, 0] == 0
    tables.apply_staged_writes()
    assert tables.compute_slot_mappings(idx_mapping, ints([0, 1]), longs([0]), 1)[0] == 12


def test_a_refused_slot_mapping_does_not_swallow_the_gather() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    idx_mapping = longs([1])

    def prepare_attn() -> None:
        with tables.fuse_gather():
            tables.gather_block_tables(idx_mapping, 1)
            tables.compute_slot_mappings(idx_mapping, ints([0, 1]), ints([0]), 1)

    with tables.defer_writes():
        tables.apply_staged_writes()
        with pytest.raises(BlockTableError, match="positions"):
            prepare_attn()
        assert tables.input_block_tables[0][0, 0] == 3


def test_no_kv_cache_group_at_all() -> None:
    per_group = [name for name, value in SIZES.items() if isinstance(value, list)]
    none: dict[str, Any] = {name: [] for name in per_group}
    tables = FusedBlockTables(**SIZES | none)
    tables.append_block_ids(0, (), overwrite=True)
    idx_mapping = longs([0])
    with tables.defer_writes():
        tables.apply_staged_writes()
        with tables.fuse_gather():
            assert tables.gather_block_tables(idx_mapping, 2) == ()
            slots = tables.compute_slot_mappings(idx_mapping, ints([0, 2]), longs([0, 1]), 4)
    assert slots.shape == (0, 4)
    assert tables.get_dummy_block_tables(2) == ()
    assert tables.get_dummy_slot_mappings(5).shape == (0, 5)
    assert tables.block_sizes == []


def test_redirected_writes_go_to_the_null_block() -> None:
    tables = FusedBlockTables(**SIZES)
    assert tables.redirect_writes_to_null_block is False
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(0, [[3, 4], [5], [6]], overwrite=True)
    tables.redirect_writes_to_null_block = False
    tables.apply_staged_writes()
    assert not tables.block_tables[0].gpu.any()
    assert tables.num_blocks.np[:, 0].tolist() == [2, 1, 1]


@pytest.mark.parametrize(("setting", "expected"), [("1", 1), ("0", 0)])
def test_kernels_are_compiled_at_construction(
    setting: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(FusedBlockTables, "warmup", lambda self: calls.append(self))
    monkeypatch.setenv("FUSED_SLOTS_WARMUP", setting)
    FusedBlockTables(**SIZES)
    assert len(calls) == expected


def test_vllm_ascends_form_takes_kernel_block_sizes_after_device_and_maps_int32() -> None:
    names = ("block_sizes", "max_num_reqs", "max_num_batched_tokens", "max_num_blocks_per_group")
    positional = [SIZES[name] for name in (*names, "device")]
    tables = FusedAscendBlockTables(*positional, [4, 2, 64], 2, 1, 2)
    assert tables.slot_mappings.dtype == torch.int32
    assert (tables.cp_size, tables.cp_rank, tables.cp_interleave) == (2, 1, 2)
    assert [table.gpu.shape[1] for table in tables.block_tables] == [8, 16, 2]
    assert FusedAscendBlockTables(**SIZES).slot_mappings.dtype == torch.int32


def test_the_attributes_that_vllm_reads() -> None:
    tables = FusedBlockTables(**SIZES)
    assert tables.block_sizes == [4, 8, 64]
    assert isinstance(tables.block_sizes, list)
    assert tables.num_kv_cache_groups == 3
    assert (tables.cp_size, tables.cp_rank, tables.cp_interleave) == (1, 0, 1)
    assert tables.num_blocks.gpu.shape == tables.num_blocks.np.shape == (3, NUM_ROWS)
    assert tables.slot_mappings.dtype == torch.int64
    assert (tables.slot_mappings == -1).all()


@pytest.mark.parametrize("capturing", [True, False])
def test_a_gather_in_a_capture_is_whole_because_the_graph_may_restore_the_tables(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = FusedBlockTables([4], 2, 8, [6], torch.device("cpu"))
    monkeypatch.setattr(tables._backend, "is_capturing", lambda: capturing, raising=False)
    invalidated = []
    invalidate = tables._backend.invalidate_gathered
    monkeypatch.setattr(
        tables._backend, "invalidate_gathered", lambda: invalidated.append(1) or invalidate()
    )
    tables.append_block_ids(0, [[5, 6]], overwrite=True)
    tables.apply_staged_writes()
    idx_mapping = torch.tensor([0], dtype=torch.int32)
    tables.gather_block_tables(idx_mapping, 1)
    tables.input_block_tables[0][0, 3] = 9
    (gathered,) = tables.gather_block_tables(idx_mapping, 1)
    assert bool(invalidated) is capturing
    if capturing:
        assert gathered.tolist() == [[5, 6, 0, 0, 0, 0]]
    with tables.fuse_gather():  # the runner's own gather is never captured
        invalidated.clear()
        tables.gather_block_tables(idx_mapping, 1)
    assert not invalidated


def test_writes_that_wait_are_applied_although_the_gather_before_them_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    run = type(tables._backend).step

    def fail_to_gather(backend: Any, step: Any) -> None:
        if step.idx_mapping is not None:
            raise RuntimeError("launch failed")
        run(backend, step)

    monkeypatch.setattr(type(tables._backend), "step", fail_to_gather)

    def gather() -> None:
        with tables.fuse_gather():
            tables.apply_staged_writes()
            tables.gather_block_tables(longs([1]), 1)

    with tables.defer_writes():
        with pytest.raises(RuntimeError, match="launch failed"):
            gather()
        assert tables.block_tables[0].gpu[1, 0] == 3
        assert not tables._rows.pending


def test_a_second_gather_launches_the_one_that_waits() -> None:
    tables = FusedBlockTables(**SIZES)
    tables.append_block_ids(1, [[3], [4], [5]], overwrite=True)
    tables.append_block_ids(2, [[6], [7], [8]], overwrite=True)
    launches = tables.launches
    with tables.defer_writes(), tables.fuse_gather():
        tables.apply_staged_writes()
        tables.gather_block_tables(longs([1]), 1)
        tables.gather_block_tables(longs([2]), 1)
        assert tables.launches == launches + 1
        assert tables.input_block_tables[0][0, 0] == 3
    assert tables.launches == launches + 2
    assert tables.input_block_tables[0][0, 0] == 6
