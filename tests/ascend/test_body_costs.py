"""What library calls do inside, found by running their bodies from the installed compiler."""

from __future__ import annotations

import pytest
from compile import ASCEND_910B3, compile_variant
from hivm import cost_report, parse
from hivm.bodies import Library, library
from hivm.body_costs import Body, Memref, is_scalar_loop, of_size
from sample_cases import CASES

LIBRARY = library(ASCEND_910B3)
assert isinstance(LIBRARY, Library)
MODULE = """
func.func @kernel(%arg0: i64) attributes {{hacc.entry}} {{
scf.for %i = %a to %b step %c : i32 {{
func.call @vadds_vs_1d_int32_t(%a) : (memref<8xi32>) -> ()
{inside}
}}
{outside}
return
}}
"""
SELECT = "func.call @vsel_sv_1d_int64_t(%a) : (memref<8xi64>) -> ()"


def test_an_addition_is_one_instruction() -> None:
    assert of_size(LIBRARY, "vadds_vs_1d_int32_t", 128) == (0, 0, 0, 1)


@pytest.mark.parametrize(("address", "cost"), [(0, (0, 0, 0, 1)), (4, (100, 2, 0, 0))])
def test_a_store_from_off_32_bytes_goes_by_scalars(address: int, cost: tuple[int, ...]) -> None:
    source, target = (Memref(at, (100,), (1,)) for at in (address, 8192))
    assert Body(LIBRARY, "store_ubuf_to_gm_1d_int32_t").cost([source, target, 0]) == cost


@pytest.mark.parametrize("size", [64, 512])
def test_selects_and_reductions_wait_inside(size: int) -> None:
    assert of_size(LIBRARY, "vsel_vs_1d_int32_t", size)[:2] == (1, 2)
    assert of_size(LIBRARY, "reduce_sum_r_int32_t", size)[:2] == (16, 8)
    assert of_size(LIBRARY, "arange_1d_int32_t", size)[:2] == (8, 2)


def test_a_select_in_int64_goes_through_its_operands_by_scalars() -> None:
    assert of_size(LIBRARY, "vsel_sv_1d_int64_t", 512).scalar == 3 * 512
    assert is_scalar_loop(LIBRARY, "vsel_sv_1d_int64_t")
    for call in ("vsel_sv_1d_int32_t", "reduce_sum_r_int32_t", "gather_1d_float"):
        assert not is_scalar_loop(LIBRARY, call)


def test_bodies_wait_for_the_events_that_were_read_in_them() -> None:
    called = {
        op.callee
        for case in CASES.values()
        for op in compile_variant(case.variant).module.entry.walk()
        if op.callee and op.name.endswith("call")
    }
    assert len(called) > 25
    for call in called:
        if of_size(LIBRARY, call, 128).waits:
            assert LIBRARY.events(call), call


@pytest.mark.parametrize(
    ("inside", "outside", "loops", "in_tile_loops"),
    [("", "", 0, 0), (SELECT, "", 1, 1), ("", SELECT, 1, 0), (SELECT, SELECT, 2, 1)],
)
def test_scalar_loops_of_bodies_are_reported(
    inside: str, outside: str, loops: int, in_tile_loops: int
) -> None:
    report = cost_report(parse(MODULE.format(inside=inside, outside=outside)), LIBRARY)
    assert (report.library_loops, report.library_loops_in_tile_loops) == (loops, in_tile_loops)
    assert report.library_waits == 2 * loops


@pytest.mark.parametrize(("left", "found"), [("%c0", 0), ("%345", 1), ("%c8", 1)])
def test_loads_that_pad_on_the_left_are_reported(left: str, found: int) -> None:
    load = f"func.call @load_gm_to_ubuf_1d_int32_t(%a, %b, %c2_i32, %c0_i32, {left}) : () -> ()"
    report = cost_report(parse(MODULE.format(inside=load, outside="")), LIBRARY)
    assert report.left_padded_loads == found
