"""The package's kernels, compiled for Ascend and executed through the public API: exact.

Here run the variants among which every two choices occur together; bench/verify_ascend.py runs
all of them, each with more cases.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from all_variants import KINDS, pairwise, variants_by_kind
from checked import CheckedVariant, faults_of, make
from compile import ASCEND_910B3, ASCEND_950
from hivm import Modes
from kernel_cases import OTHERS, POWERS, SETUPS, STATE, Batch, Setup, expected

from fused_slots import KVCacheGroup
from fused_slots.backends.ascend.plan import SPAN
from fused_slots.backends.launch import Variant

CASES = {ASCEND_910B3: 100, ASCEND_950: 40}
KIND_OF = {v: kind for kind, variants in variants_by_kind().items() for v in variants}
PAIRS = pairwise(KIND_OF)


@pytest.mark.parametrize("target", CASES)
@pytest.mark.parametrize("variant", PAIRS, ids=str)
def test_results_equal_the_oracles(variant: Variant, target: str) -> None:
    checked = CheckedVariant(KINDS[KIND_OF[variant]], target, variant)
    checked.run(CASES[target])
    assert checked.cases == CASES[target]


@pytest.mark.parametrize(
    "modes", [Modes(division_ulps=-1), Modes(division_ulps=1), Modes(flush_tail=False)], ids=str
)
@pytest.mark.parametrize("kind", ["others_ring_int32", "others_sharded_int32"])
def test_slots_do_not_depend_on_what_hardware_leaves_open(kind: str, modes: Modes) -> None:
    variants = [v for v in variants_by_kind()[kind] if v.kernel == "slots_on_ascend"]
    for variant in pairwise(variants)[:2]:
        CheckedVariant(KINDS[kind], ASCEND_910B3, variant, modes).run(20)


def long_rows() -> list[Variant]:
    """Variants of rows of 131,072 columns: short and long queries, slots alone and a step."""
    backend = make(SETUPS["long_rows"], ASCEND_910B3)._backend
    return [
        variant
        for variant in backend.variants()
        if (variant.index_dtype, variant.slot_dtype) == (torch.int32, torch.int64)
        and not dict(variant.constants).get("FLAT")
    ]


@pytest.mark.parametrize("variant", long_rows(), ids=str)
def test_rows_of_131072_columns(variant: Variant) -> None:
    cases = 200 if variant.kernel == "slots_on_ascend" else 30
    CheckedVariant(SETUPS["long_rows"], ASCEND_910B3, variant).run(cases)


@pytest.mark.parametrize("block_size", [4, 6])
def test_runs_of_more_columns_than_a_window_go_by_tiles(block_size: int) -> None:
    setup = Setup((KVCacheGroup(block_size, 256),))
    long = [
        variant
        for variant in make(setup, ASCEND_910B3)._backend.variants()
        if dict(variant.constants)["RUNS"] and variant.index_dtype is torch.int32
    ]
    for variant in long:
        CheckedVariant(setup, ASCEND_910B3, variant).run(40)


def almost_runs(span: int) -> dict[str, tuple[list[int], np.ndarray]]:
    """Query lengths and positions of a span of tokens that is a run, or nearly one."""
    run = np.arange(span)
    cases = {
        "a run": ([span], run),
        "a run that begins within a column": ([span], run + 5),
        "a run that ends within a span": ([span - 1], run[:-1]),
        "the last token is another request's": ([span - 1, 1], run),
        "the last token is nobody's": ([span, 1], np.append(run, 3)),
        "all negative": ([span], run - span - 16),
        "negative at first": ([span], run - 16),
        "up to 2^31 - 1": ([span], run + 2**31 - span),
    }
    for place in (0, span // 2, span - 1):
        for what in (-(2**63), -(2**32), -(2**31), -1, 1, 2**31, 2**32, 2**62):
            position = run.copy()
            position[place] += what
            cases[f"token {place} is {what} further"] = [span], position
    return cases


@pytest.mark.parametrize("columns", [31, 32, 33])
@pytest.mark.parametrize("name", almost_runs(SPAN))
def test_spans_that_are_almost_runs(name: str, columns: int) -> None:
    """Rows that have all columns of 512 tokens, one fewer and one more."""
    group = KVCacheGroup(SPAN // 32, 40)
    setup = Setup((group,), capacity=SPAN + 8)
    lengths, positions = almost_runs(SPAN)[name]
    tables = make(setup, ASCEND_910B3)
    rows = [{row: list(range(100 * row, 100 * row + columns)) for row in (1, 2)}]
    for row, ids in rows[0].items():
        tables.append_block_ids(row, (ids,), overwrite=True)
    tables.apply_staged_writes()
    index = np.array([2, 1][: len(lengths)])
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    batch = Batch(name, rows, index, starts, positions, None)
    arguments = [torch.from_numpy(a) for a in (index.astype(np.int32), starts, positions)]
    slots, faults = expected(setup, batch)
    found = tables.compute_slot_mappings(*arguments, setup.capacity)
    variant, _ = tables._backend.launcher.executions[-1]
    assert dict(variant.constants)["RUNS"]
    np.testing.assert_array_equal(found.numpy(), slots)
    assert faults_of(tables) == faults


def mapped(
    setup: Setup, columns: int, batch: tuple[list[int], ...], view: int, **replay: list[int]
) -> None:
    """Map one batch of rows with so many columns each; slots and faults are the reference's."""
    tables = make(setup, ASCEND_910B3)
    rows = [{row: list(range(100 * row, 100 * row + columns)) for row in (1, 2)}
            for _ in setup.groups]  # fmt: skip
    for row in (1, 2):
        tables.append_block_ids(row, [ids[row] for ids in rows], overwrite=True)
    tables.apply_staged_writes()
    arrays = [np.array(a, t) for a, t in zip(batch, (np.int32, np.int32, np.int64), strict=True)]
    given = {name: np.array(numbers, np.int32) for name, numbers in replay.items()}
    case = Batch("", rows, *arrays, given.get("replay_start"), given.get("replay_len"))
    slots, faults = expected(setup, case, view)
    tables.slot_mappings.fill_(-77)
    tables.compute_slot_mappings(
        *map(torch.from_numpy, arrays),
        view,
        **{name: torch.from_numpy(numbers) for name, numbers in given.items()},
    )
    np.testing.assert_array_equal(tables.slot_mappings.numpy(), slots)
    assert faults_of(tables) == faults


@pytest.mark.parametrize("begin", [0, 1, 33, 600])
@pytest.mark.parametrize("view", [-1, 0, 1])
def test_tokens_before_the_first_are_padded_and_narrow_views_counted(begin: int, view: int) -> None:
    lengths = [3, SPAN]
    starts = [begin, begin + lengths[0], begin + sum(lengths)]
    positions = [7] * begin + [*range(3), *range(SPAN)]
    setup = Setup((KVCacheGroup(16, 40), STATE), capacity=2 * SPAN + 120)
    mapped(setup, 1, ([2, 1], starts, positions), starts[-1] + view)


@pytest.mark.parametrize("start", [0, 1, 2**31 - 8])
@pytest.mark.parametrize("length", [-(2**31), -1, 0, 20, 2**31 - 1])
def test_replays_at_the_edges_of_int32(start: int, length: int) -> None:
    far = [2**31 - 9, 2**31 - 1, 2**31, 2**31 + 11, 2**31 + 12, 2**31 + 100, 2**32 - 3, 2**32 - 2]
    far += [2**32 - 1, 2**32, 2**32 + 2**31 - 8, 2**32 + 2**31 + 4, 2**40]
    setup = Setup((KVCacheGroup(16, 40),), replay_window=5, capacity=SPAN + 64)
    positions = [*range(SPAN), *far]
    starts = [0, SPAN, len(positions)]
    mapped(setup, 40, ([2, 1], starts, positions), len(positions),
           replay_start=[start, start], replay_len=[length, length])  # fmt: skip


@pytest.mark.parametrize("num_tokens", [8, SPAN])
def test_a_negative_number_of_tokens_maps_none_and_pads_all(num_tokens: int) -> None:
    tables = make(Setup((KVCacheGroup(16, 40),), capacity=SPAN), ASCEND_910B3)
    tables.append_block_ids(0, ([3, 4],), overwrite=True)
    tables.apply_staged_writes()
    starts = torch.tensor([0, -40], dtype=torch.int32)
    positions = torch.arange(num_tokens)
    out = torch.full((1, num_tokens), -77, dtype=torch.int32)
    tables.compute_slot_mappings(torch.tensor([0], dtype=torch.int32), starts, positions,
                                 num_tokens, out=out)  # fmt: skip
    assert out.tolist() == [[-1] * num_tokens]
    assert faults_of(tables) == {}


@pytest.mark.parametrize("far", [2**24, 2**26, 2**27, 2**28, 2**31 - 2 * SPAN])
def test_far_positions_of_rings_whose_block_is_no_power_of_two(far: int) -> None:
    """A quotient by the vector unit's float32 is off by more than one from 2^23 on."""
    rings = tuple(
        KVCacheGroup(size, 1, circular=True, prefix_cacheable=False) for size in (3, 5, 11, 12, 13)
    )
    positions = [*range(far, far + SPAN), *range(far + SPAN, far, -3)]
    starts = [0, SPAN, len(positions)]
    setup = Setup(rings, capacity=len(positions))
    mapped(setup, 1, ([2, 1], starts, positions), len(positions))


@pytest.mark.parametrize("num_tokens", [64, 600])
@pytest.mark.parametrize(
    ("first", "inner", "last"),
    [(first, inner, 0) for first in (0, 2**31 - 1, -7) for inner in (0, 2**31 - 1, -5, -(2**31))]
    + [(1334718195, 5, -1900000000)],
)
def test_garbage_offsets_reach_no_other_memory(
    first: int, inner: int, last: int, num_tokens: int
) -> None:
    """The executor refuses every access outside a tensor and two programs on one word; it ends."""
    setup = Setup((KVCacheGroup(16, 40), KVCacheGroup(32, 40)), num_rows=64, capacity=640)
    tables = make(setup, ASCEND_910B3)
    for row in range(40):
        tables.append_block_ids(row, (list(range(40)), list(range(40))), overwrite=True)
    tables.apply_staged_writes()
    starts = torch.tensor([first, *[inner] * 39, last or num_tokens], dtype=torch.int32)
    arguments = [torch.arange(40, dtype=torch.int32), starts, torch.arange(num_tokens)]
    for slots in (
        tables.compute_slot_mappings(*arguments, num_tokens),
        tables.step(*arguments, num_tokens_padded=num_tokens)[1],
    ):
        assert int(slots.min()) >= -1
        assert int(slots.max()) < 40 * 32


@pytest.mark.parametrize("groups", [POWERS, OTHERS], ids=["powers", "others"])
def test_rows_of_several_chunks(groups: tuple) -> None:
    """More rows than a program holds numbers of on chip: 600 of them, used at chunks' edges."""
    setup = Setup(groups, num_rows=600, capacity=64)
    tables = make(setup, ASCEND_910B3)
    used = [0, 1, 254, 255, 256, 257, 511, 512, 513, 599]
    rng = np.random.default_rng(0)
    filled: list[dict[int, list[int]]] = [{} for _ in groups]
    for case in range(12):
        for row in used if case == 0 else rng.choice(used, 3, replace=False).tolist():
            counts = [min(int(rng.integers(1, 5)), group.max_num_blocks) for group in groups]
            blocks = [rng.integers(0, 99, count).tolist() for count in counts]
            tables.append_block_ids(row, tuple(blocks), overwrite=True)
            for g, group in enumerate(groups):
                n = group.columns_per_block
                filled[g][row] = [i * n + c for i in blocks[g] for c in range(n)]
        index = rng.permutation(used)
        positions = rng.integers(0, 90, 3 * len(index))
        starts = np.arange(len(index) + 1, dtype=np.int32) * 3
        batch = Batch("decode", filled, index, starts, positions, None)
        arguments = [torch.from_numpy(a) for a in (index.astype(np.int32), starts, positions)]
        slots, faults = expected(setup, batch)
        gathered, in_step = tables.step(*arguments, num_tokens_padded=30)
        np.testing.assert_array_equal(in_step.numpy(), slots[:, :30])
        assert faults_of(tables) == faults
        alone = tables.compute_slot_mappings(*arguments, 30)
        np.testing.assert_array_equal(alone.numpy(), slots[:, :30])
        assert faults_of(tables) == faults
        for g, table in enumerate(gathered):
            for entry, row in enumerate(index.tolist()):
                ids = filled[g][row]
                assert table[entry, : len(ids)].tolist() == ids
                assert not table[entry, len(ids) :].any()
