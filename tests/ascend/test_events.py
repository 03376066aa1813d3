"""Events that library calls use themselves, read from the installed compiler's own library."""

from __future__ import annotations

import pytest
from compile import ASCEND_910B3, ASCEND_950, compile_variant
from hivm import parse
from hivm.bodies import Library, library
from hivm.events import ANY, collisions
from sample_cases import CASES

LIBRARY = library(ASCEND_910B3)
assert isinstance(LIBRARY, Library)
USED = "vsel_vs_1d_int32_t"
"""A call whose body sets and waits for S -> V event 6 itself."""


def test_bodies_name_the_events_that_they_use() -> None:
    assert LIBRARY.events(USED) == {("S", "V", 6), ("V", "S", 6)}
    assert LIBRARY.events("arange_1d_int32_t") == {("S", "V", 6), ("V", "S", 6)}
    assert LIBRARY.events("store_ubuf_to_gm_1d_int32_t") == {("S", "MTE3", 6), ("MTE3", "S", 6)}
    assert LIBRARY.events("vcast_float_to_int32_t_1d_with_mode") == set()
    assert not LIBRARY.holds("no_such_call")


def test_no_body_uses_another_number() -> None:
    calls = [name for name in LIBRARY.functions if name.startswith("_mlir_ciface_")]
    assert len(calls) > 1000
    assert {event[2] for call in calls for event in LIBRARY.events(call)} == {6}


def test_every_call_of_the_samples_is_in_the_library() -> None:
    for case in CASES.values():
        for op in compile_variant(case.variant).module.entry.walk():
            if op.name.endswith("call"):
                assert LIBRARY.holds(op.callee), op.callee


def test_of_a_library_that_cannot_be_read_the_worst_is_assumed() -> None:
    wait = flag("wait", "<EVENT_ID7>", "V", "MTE2")
    found = collisions(
        parse(module_of(flag("set", "<EVENT_ID7>", "V", "MTE2"), CALL, wait)), library(ASCEND_950)
    )
    assert [c.event for c in found] == [("V", "MTE2", 7)]


def module_of(*lines: str) -> str:
    """A lowered module whose entry function holds these lines."""
    head = "func.func @kernel(%arg0: i64) attributes {hacc.entry} {"
    return "\n".join([head, *lines, "return", "}"])


def flag(kind: str, event: str, source: str = "S", target: str = "V") -> str:
    return f"hivm.hir.{kind}_flag[<PIPE_{source}>, <PIPE_{target}>, {event}]"


CALL = f"func.call @{USED}(%a) : (memref<8xi32>) -> ()"
SET, WAIT = flag("set", "<EVENT_ID6>"), flag("wait", "<EVENT_ID6>")


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([SET, CALL, WAIT], 3),
        ([SET, "scf.if %c {", CALL, "}", WAIT], 4),
        (["scf.if %c {", SET, "} else {", "}", CALL], 6),
        ([SET, "scf.for %i = %a to %b step %c : i32 {", WAIT, CALL, SET, "}", WAIT, CALL], None),
        ([SET, "scf.for %i = %a to %b step %c : i32 {", CALL, WAIT, SET, "}", WAIT], 4),
        (["scf.for %i = %a to %b step %c : i32 {", CALL, SET, "}"], 3),  # of the turn before
        ([SET, WAIT, CALL], None),
        ([flag("set", "<EVENT_ID5>"), CALL, flag("wait", "<EVENT_ID5>")], None),
        ([flag("set", "<EVENT_ID6>", "MTE2"), CALL], None),  # of another pair of pipes
        ([flag("set", "%e"), CALL, flag("wait", "%e")], 3),  # chosen at run time: may be 6
    ],
)  # fmt: skip
def test_a_live_event_across_a_call_is_found(lines: list[str], line: int | None) -> None:
    found = collisions(parse(module_of(*lines)), LIBRARY)
    assert [(c.line, c.call, c.event) for c in found] == (
        [] if line is None else [(line, USED, ("S", "V", 6))]
    )
    assert ANY < 0


def test_a_graph_of_blocks_is_followed_round() -> None:
    text = module_of(
        "cf.br ^bb1", "^bb1:", CALL, "cf.cond_br %c, ^bb2, ^bb3", "^bb2:", SET, "cf.br ^bb1",
        "^bb3:", WAIT,
    )  # fmt: skip
    assert [c.line for c in collisions(parse(text), LIBRARY)] == [4]


def test_a_collision_says_where() -> None:
    [found] = collisions(parse(module_of(SET, CALL, WAIT)), LIBRARY)
    assert str(found) == f"line 3: @{USED} uses S -> V event 6, live"
