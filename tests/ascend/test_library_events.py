"""No kernel holds an event that the vector library sets and waits for itself."""

from __future__ import annotations

from functools import cache

import pytest
from all_variants import KINDS, pairwise, variants_by_kind
from compile import ASCEND_910B3
from hivm import parse
from hivm_backend import executed_on
from library_events import Event, Library, collisions

VARIANTS = variants_by_kind()
CHOSEN = set(pairwise(variant for variants in VARIANTS.values() for variant in variants))
SCALAR_TO_VECTOR = Event("PIPE_S", "PIPE_V", 6)
HELD = """
module {
  func.func @kernel(%arg0: i64) attributes {hacc.entry} {
    hivm.hir.set_flag[<PIPE_S>, <PIPE_V>, <EVENT_ID6>]
    scf.for %i = %c0 to %c4 step %c1 {
      hivm.hir.wait_flag[<PIPE_S>, <PIPE_V>, <EVENT_ID6>]
      func.call @CALLED(%arg0) : (i64) -> ()
      hivm.hir.set_flag[<PIPE_S>, <PIPE_V>, <EVENT_ID6>]
      func.call @CALLED(%arg0) : (i64) -> ()
    }
    hivm.hir.wait_flag[<PIPE_S>, <PIPE_V>, <EVENT_ID6>]
    func.call @CALLED(%arg0) : (i64) -> ()
    return
  }
}
"""


@cache
def library() -> Library:
    return Library()


@pytest.mark.parametrize("callee", ["vsel_vs_1d_int32_t", "arange_1d_int32_t"])
def test_selects_and_ranges_use_an_event_of_their_own(callee: str) -> None:
    assert SCALAR_TO_VECTOR in library().events(callee, always=True)


def test_an_addition_may_use_one_where_its_addresses_are_not_aligned() -> None:
    assert library().events("vadds_vs_1d_int32_t", always=True) == frozenset()
    assert SCALAR_TO_VECTOR in library().events("vadds_vs_1d_int32_t")


@pytest.mark.parametrize(
    ("callee", "found"), [("vsel_vs_1d_int32_t", 1), ("load_gm_to_ubuf_1d_int32_t", 0)]
)
def test_a_call_while_the_event_is_set_is_found(callee: str, found: int) -> None:
    module = parse(HELD.replace("CALLED", callee))
    assert len(collisions(module, library())) == found


@pytest.mark.parametrize("kind", KINDS)
def test_no_variant_holds_an_event_across_a_call_that_uses_it(kind: str) -> None:
    with executed_on(ASCEND_910B3):
        backend = KINDS[kind].make()._backend
    for variant in VARIANTS[kind]:
        if variant in CHOSEN:
            backend._bound(variant)
            module = backend.launcher.kernels[variant].module
            assert collisions(module, library()) == [], str(variant)
