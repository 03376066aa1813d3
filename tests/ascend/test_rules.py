"""How Triton forms lower, as counted in compiled code; kernels rely on these facts.

A fact that stops holding with another compiler version fails here by name.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import samples
from compile import (
    ASCEND_910B3,
    ASCEND_950,
    TARGETS,
    CompiledKernel,
    CompileFailure,
    Variant,
    compile_variant,
)
from hivm import EXACT, Modes, OutOfBounds, Race, UnsupportedOperation, execute
from sample_cases import CASES

_MOVES = ("load_gm", "store_ubuf", "broadcast_scalar")


def sample(name: str, target: str = ASCEND_910B3, **constexprs: int) -> CompiledKernel:
    variant = CASES[name].variant
    constexprs = {**variant.constexprs, **constexprs}
    return compile_variant(replace(variant, constexprs=constexprs), target)


def other(kernel: str, pointers: str, scalars: str = "", wide: str = "",
          target: str = ASCEND_910B3, **constexprs: int) -> CompiledKernel:  # fmt: skip
    signature = {p: "*i64" if p in wide.split() else "*i32" for p in pointers.split()}
    signature |= dict.fromkeys(scalars.split(), "i32")
    variant = Variant(kernel, getattr(samples, kernel), signature, constexprs)
    return compile_variant(variant, target)


def arithmetic_calls(kernel: CompiledKernel) -> dict[str, int]:
    return {k: v for k, v in kernel.cost.calls.items() if not k.startswith(_MOVES)}


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def test_modulo_is_a_scalar_loop_on_910b_and_none_on_950() -> None:
    assert sample("modulo").cost.scalar_loops == 1
    assert sample("modulo", ASCEND_950).cost.scalar_loops == 0
    x = np.arange(1024, dtype=np.int32)
    plain = execute(sample("shift_and_mask").module, (1,), [x, x, 1024, 1, 1]).counts[0]
    modulo = execute(sample("modulo").module, (1,), [x, x.copy(), 1024, 7]).counts[0]
    assert modulo.scalar_ops - plain.scalar_ops == pytest.approx(3 * 1024, abs=10)


def test_remainder_by_subtraction_is_five_vector_calls() -> None:
    assert sum(arithmetic_calls(sample("subtract_multiple")).values()) == 5
    assert sample("subtract_multiple").cost.scalar_loops == 0


def test_a_sum_of_signs_along_rows_is_three_calls() -> None:
    calls = arithmetic_calls(sample("begun_entries"))
    of_tile = {"vsub_2d_int32_t": 1, "vshrs_vs_1d_int32_t": 1, "reduce_sum_ra_int32_t": 1}
    assert of_tile.items() <= calls.items()
    assert sample("begun_entries").cost.library_loops == 0


def test_division_goes_through_float32() -> None:
    assert arithmetic_calls(sample("floor_divide")) == {
        "vcast_int32_t_to_float_1d_with_mode": 1,
        "vdiv_vs_1d_float": 1,
        "vcast_float_to_int32_t_1d_with_mode": 1,
    }


def divided(values: list[int], divisor: int, modes: Modes = EXACT) -> list[int]:
    x = zeros(1024)
    x[: len(values)] = values
    arguments = [x, zeros(1024), 1024, divisor]
    return execute(sample("floor_divide").module, (1,), arguments, modes=modes).outputs[1].tolist()


def test_division_is_exact_below_two_to_the_24_and_wrong_from_16777343_on() -> None:
    first_wrong = 16777343
    for begin in range(2**24 - 512, first_wrong + 1, 1024):
        values = list(range(begin, begin + 1024))
        quotients = divided(values, 128)
        wrong = [v for v, q in zip(values, quotients, strict=True) if q != v // 128]
        assert [v for v in wrong if v < first_wrong] == []
        assert (first_wrong in values) == (first_wrong in wrong)


def test_division_needs_a_correctly_rounded_quotient() -> None:
    assert divided([48 * 7], 48)[0] == 7
    assert divided([48 * 7], 48, Modes(division_ulps=-1))[0] == 6


def test_division_truncates_negatives_and_a_shift_floors() -> None:
    assert divided([-1, -129], 128)[:2] == [0, -1]
    x = zeros(1024)
    x[:2] = [-1, -129]
    shifted = execute(sample("shift_and_mask").module, (1,), [x, x, 1024, 7, 0]).outputs[1]
    assert shifted[:2].tolist() == [-1000, -2000]


def test_corrected_division_costs_fifteen_calls_and_a_broadcast() -> None:
    assert sum(arithmetic_calls(sample("corrected_divide")).values()) == 15


def test_a_runtime_shift_is_one_call() -> None:
    assert arithmetic_calls(sample("shift_and_mask"))["vshrs_vs_1d_int32_t"] == 1


def test_int64_products_are_a_scalar_loop_and_casts_one_call() -> None:
    assert sample("wide_product").cost.scalar_loops == 1
    widen = sample("widen")
    assert widen.cost.scalar_loops == 0
    assert widen.cost.calls["vcast_int64_t_to_int32_t_1d_with_overflow"] == 1
    assert widen.cost.calls["vcast_int32_t_to_int64_t_1d_with_mode"] == 1


@pytest.mark.parametrize("target", TARGETS)
def test_gather_of_int32_is_refused_by_the_front_end(target: str) -> None:
    with pytest.raises(CompileFailure, match=r"front end(.|\n)*int32") as failure:
        other("gather_int32", "index_ptr table_ptr out_ptr", target=target, TILE=64)
    assert failure.value.variant == "gather_int32"
    assert failure.value.target == target


def test_gather_through_a_bitcast_is_one_call() -> None:
    assert arithmetic_calls(sample("window_gather"))["gather_1d_float"] == 1
    assert sample("window_gather").cost.scalar_loops == 0


def test_uint32_division_is_a_compile_error() -> None:
    with pytest.raises(CompileFailure, match="uint32_t_to_float") as failure:
        other("unsigned_divide", "x_ptr out_ptr", "divisor", TILE=64)
    assert failure.value.stage == "bishengir-compile"


def test_a_tile_that_does_not_fit_ub_is_a_compile_error() -> None:
    with pytest.raises(CompileFailure, match="ub overflow, requires"):
        other("too_large", "x_ptr y_ptr out_ptr", TILE=16384)


@pytest.mark.parametrize("target", TARGETS)
def test_a_discrete_load_is_one_scalar_gm_load_an_element(target: str) -> None:
    kernel = sample("discrete_load", target)
    assert kernel.cost.discrete_loops == 1
    x = zeros(64)
    counts = execute(kernel.module, (1,), [x, x, x.copy(), 64, 0]).counts[0]
    assert counts.gm_scalar_loads == 64


@pytest.mark.parametrize("target", TARGETS)
def test_a_discrete_load_reads_lanes_that_its_mask_turns_off(target: str) -> None:
    kernel = other("discrete_load_masked", "index_ptr table_ptr out_ptr", "n", target=target,
                   TILE=64)  # fmt: skip
    index = np.full(64, -1, np.int32)
    with pytest.raises(OutOfBounds, match=r"argument 1: bytes \[-4, 0\)"):
        execute(kernel.module, (1,), [index, zeros(64), zeros(64), 64])


def test_an_index_forced_into_ub_costs_fewer_scalar_ops_than_one_clamped_in_the_loop() -> None:
    x = zeros(64)
    clamped = execute(sample("discrete_load").module, (1,), [x, x, x.copy(), 64, 63]).counts[0]
    assert clamped.scalar_ops == pytest.approx(5 * 64, abs=12)
    row, position = np.arange(32, dtype=np.int32), np.zeros(32, np.int64)
    arguments = [row, position, zeros(64), zeros(32), position.copy(), 32, 2, 4, 15]
    decode = execute(sample("decode_tile").module, (1,), arguments).counts[0]
    assert decode.gm_scalar_loads == 64
    assert decode.scalar_ops == pytest.approx((3 + 4) * 32, abs=12)


def test_a_store_mask_made_of_data_rewrites_the_whole_tile() -> None:
    kernel = other("store_with_data_mask", "x_ptr out_ptr starts_ptr", TILE=256)
    assert kernel.cost.calls["load_gm_to_ubuf_1d_int32_t"] == 2
    starts = np.array([0, 100, 200], np.int32)
    with pytest.raises(OutOfBounds, match="argument 1"):
        execute(kernel.module, (1,), [zeros(200), zeros(200), starts])
    execute(kernel.module, (1,), [zeros(200), zeros(512), starts])
    with pytest.raises(Race, match="argument 1"):  # though the masks are disjoint
        execute(kernel.module, (2,), [zeros(200), zeros(512), starts])


def test_a_lower_bound_of_a_store_is_one_transfer_only_on_a_32_byte_boundary() -> None:
    x = zeros(256)
    module = sample("two_bounds").module
    aligned = execute(module, (1,), [x, x.copy(), 8, 200]).counts[0]
    assert (aligned.dma_transfers, aligned.gm_scalar_stores) == (2, 0)
    unaligned = execute(module, (1,), [x, x.copy(), 5, 200]).counts[0]
    assert (unaligned.dma_transfers, unaligned.gm_scalar_stores) == (1, 195)


def test_unaligned_stores_of_neighbours_race_for_a_cache_line() -> None:
    """Two programs share the line round element 4: the scalar store of one loses the other's."""
    module = sample("two_bounds", TILE=4).module
    x = zeros(8)
    with pytest.raises(Race, match="argument 1"):
        execute(module, (2,), [x, x.copy(), 1, 7])


@pytest.mark.parametrize("target", TARGETS)
def test_the_mask_of_a_scalar_atomic_is_dropped(target: str) -> None:
    kernel = other("masked_scalar_atomic", "x_ptr count_ptr", "n limit", target=target, TILE=64)
    ones = np.ones(64, np.int32)
    assert execute(kernel.module, (1,), [ones, zeros(1), 64, 1000]).outputs[1].tolist() == [64]


@pytest.mark.parametrize("target", TARGETS)
def test_an_int32_count_under_an_if_is_one_atomic_transfer_only_where_needed(target: str) -> None:
    kernel = sample("count_faults", target)
    assert kernel.cost.locks == 0
    x = zeros(1024)
    healthy = execute(kernel.module, (1,), [x, zeros(1), 1024, 9]).counts[0]
    faulty = execute(kernel.module, (1,), [x + 9, zeros(1), 1024, 9]).counts[0]
    assert (healthy.atomics, faulty.atomics) == (0, 1)
    assert healthy.dma_transfers == 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "pointers", "wide"),
    [
        ("wide_counter", "x_ptr count_ptr", "count_ptr"),
        ("atomic_ticket", "x_ptr count_ptr out_ptr", ""),
    ],
)
def test_int64_atomics_and_used_results_take_an_in_order_lock(
    kernel: str, pointers: str, wide: str, target: str
) -> None:
    compiled = other(kernel, pointers, "n", wide, target=target, TILE=256)
    assert compiled.cost.locks == 1
    arguments = [zeros(1), zeros(1), zeros(1)][: len(pointers.split())]
    with pytest.raises(UnsupportedOperation, match="in-order lock"):
        execute(compiled.module, (1,), [*arguments, 1])


def test_rows_a_stride_apart_are_one_transfer_and_loaded_rows_one_each() -> None:
    assert sample("rows_gather").cost.discrete_loops == 0
    row, table = np.arange(32, dtype=np.int32), zeros(32 * 128)
    together = execute(sample("rows_gather").module, (1,), [row, table, zeros(32), 32, 128])
    each = execute(
        sample("indexed_rows_gather").module, (1,), [row, row, table, zeros(32), 32, 128]
    )
    assert together.counts[0].dma_transfers == 3
    assert each.counts[0].dma_transfers == 3 + 32
    assert each.counts[0].gm_scalar_loads == 0


def test_unrolling_the_groups_costs_ub_and_saves_nothing() -> None:
    loop, unrolled = sample("descriptors").cost, sample("static_groups").cost
    assert loop.ub_bytes < unrolled.ub_bytes
    assert loop.gm_scalar_loads * 4 == unrolled.gm_scalar_loads


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("modulo", "wide_product")])
def test_no_sample_but_the_two_falls_back_to_scalar_loops(name: str, target: str) -> None:
    cost = sample(name, target).cost
    assert cost.scalar_loops == 0
    assert cost.ub_bytes <= 96 * 1024
