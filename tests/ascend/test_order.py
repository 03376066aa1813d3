"""What the pipes of a core may run in either order never touches a byte that one of them writes.

910B only: the compiler puts no barrier between the vector functions of a 950, which has to run them
in order by itself.

Waits and barriers are left out one at a time, too: each is either missed by the check, or shown to
be redundant in all that the variant was seen to do, since nothing it orders was unordered without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from all_variants import KINDS, pairwise, variants_by_kind
from checked import CheckedVariant
from compile import ASCEND_910B3, compile_variant
from hivm import execute, parse
from hivm.order import Trace
from sample_cases import CASES

from fused_slots.backends.launch import Variant

CHOSEN = pairwise([variant for variants in variants_by_kind().values() for variant in variants])
KIND_OF = {v: kind for kind, variants in variants_by_kind().items() for v in variants}
BATCHES = 6
READ_TOO_EARLY = ("V", "memref.load")


def traces_of(variant: Variant) -> list[Trace]:
    kind = KINDS[KIND_OF[variant]]
    checked = CheckedVariant(kind, ASCEND_910B3, variant, recorded=True)
    checked.run(BATCHES)
    return list(checked.traces.values())


def sample(name: str, drop: str = "") -> list[Trace]:
    """Traces of a sample on 910B, without the lines that hold `drop`."""
    text = compile_variant(CASES[name].variant).hivm
    lines = [line for line in text.splitlines() if not drop or drop not in line]
    grid, arguments, _ = CASES[name].make(np.random.default_rng(0))
    return execute(parse("\n".join(lines)), grid, arguments, recorded=True).traces


@pytest.mark.parametrize("variant", CHOSEN[::2], ids=str)
def test_accesses_are_ordered_and_what_orders_them_is_missed(variant: Variant) -> None:
    traces = traces_of(variant)
    unordered = [found for trace in traces if (found := trace.unordered())]
    assert list(map(str, unordered)) == []
    lines = set().union(*(trace.lines_of_synchronisation() for trace in traces))
    missed = {line for line in lines if is_missed(traces, line)}
    for line in lines - missed:
        assert not any(naively_unordered(trace, {line}) for trace in shortest(traces, line))
    # Whole rows are copied in loops of one turn, most of whose waits are for the next.
    if not dict(variant.constants).get("WHOLE"):
        assert len(missed) * 10 > 6 * len(lines), "most of what the compiler sets is needed"


def is_missed(traces: list[Trace], line: int) -> bool:
    without = frozenset([line])
    return any(
        trace.unordered(without) for trace in traces if line in trace.lines_of_synchronisation()
    )


def shortest(traces: list[Trace], line: int) -> list[Trace]:
    """The trace in which a naive check of the line costs least, if it is short enough."""
    with_it = [t for t in traces if line in t.lines_of_synchronisation() and len(t.actions) < 300]
    return sorted(with_it, key=lambda trace: len(trace.actions))[:1]


@pytest.mark.parametrize("name", CASES)
def test_samples_are_ordered(name: str) -> None:
    assert [str(found) for trace in sample(name) if (found := trace.unordered())] == []


@pytest.mark.parametrize(
    ("drop", "first", "second"),
    [
        ("wait_flag[<PIPE_MTE2>, <PIPE_V>", "MTE2", "V"),
        ("wait_flag[<PIPE_V>, <PIPE_MTE3>", "V", "MTE3"),
        ("pipe_barrier[<PIPE_V>]", "V", "V"),
    ],
)
def test_a_missing_wait_or_barrier_is_named(drop: str, first: str, second: str) -> None:
    [trace] = sample("shift_and_mask")[:1]
    lines = compile_variant(CASES["shift_and_mask"].variant).hivm.splitlines()
    left_out = frozenset(n + 1 for n, line in enumerate(lines) if drop in line)
    found = trace.unordered(left_out)
    assert found is not None
    assert (found.first.pipe, found.second.pipe) == (first, second)
    assert f"line {found.second.line} " in str(found)


def test_a_barrier_that_is_not_there_is_seen() -> None:
    traces = sample("shift_and_mask", drop="pipe_barrier[<PIPE_V>]")
    assert any(trace.unordered() for trace in traces)


def test_barriers_in_place_of_flags_leave_scalar_reads_unordered() -> None:
    """Why inject_barrier_all would be no way out: a reduction's result is read without a wait."""
    case = CASES["reductions"]
    variant = replace(case.variant, options={"multibuffer": False, "inject_barrier_all": True})
    text = compile_variant(variant).hivm
    assert "set_flag" not in text
    grid, arguments, _ = case.make(np.random.default_rng(0))
    traces = execute(parse(text), grid, arguments, recorded=True).traces
    found = [unordered for trace in traces if (unordered := trace.unordered())]
    assert {(one.first.pipe, one.second.name) for one in found} == {READ_TOO_EARLY}


@pytest.mark.parametrize("name", ["shift_and_mask", "discrete_load", "count_faults", "reductions"])
def test_clocks_agree_with_a_graph(name: str) -> None:
    """The clocks against reachability in the graph of all that orders, line by line."""
    for trace in sample(name)[:2]:
        assert not naively_unordered(trace, set())
        for line in trace.lines_of_synchronisation():
            expected = naively_unordered(trace, {line})
            assert (trace.unordered(frozenset([line])) is not None) == expected, line


def naively_unordered(trace: Trace, without: set[int]) -> bool:
    """Whether some conflict is no path in the graph of instructions and synchronisation."""
    reach: dict[int, set[int]] = {}
    for earlier, later in edges(trace, without):
        reach.setdefault(later, set()).update({earlier}, reach.get(earlier, ()))
    at = [n for n, action in enumerate(trace.actions) if action[0] == "issue"]
    return any(
        at[first] not in reach.get(at[second], ())
        for second, firsts in trace.conflicts.items()
        for first in firsts
    )


def edges(trace: Trace, without: set[int]) -> Iterator[tuple[int, int]]:
    """Orders between actions, by their numbers, later ones last.

    A set or barrier follows all that its pipe was given; all that a pipe is given follows its
    waits and barriers, and those of the scalar unit; the scalar unit's own work is in order.
    """
    given: dict[str, list[int]] = {}
    gates: dict[str, list[int]] = {}
    sets: dict[object, list[int]] = {}
    for n, (kind, what, *line) in enumerate(trace.actions):
        if kind == "issue":
            pipe = trace.instructions[what].pipe
            gate = gates.get(pipe, []) + [g for g in gates.get("S", []) if pipe != "S"]
            yield from ((g, n) for g in gate)
            if pipe == "S":
                yield from ((g, n) for g in given.get("S", ()))
            given.setdefault(pipe, []).append(n)
        elif kind == "set":
            yield from ((g, n) for g in given.get(what[0], []) + gates.get(what[0], []))
            sets.setdefault(what, []).append(n)
        elif kind == "wait":
            setter = sets[what].pop(0)
            if line[0] not in without:
                yield setter, n
                gates.setdefault(what[1], []).append(n)
        elif kind == "barrier" and line[0] not in without:
            pipes = ["S", "V", "MTE2", "MTE3"] if what == "ALL" else [what]
            for pipe in pipes:
                yield from ((g, n) for g in given.get(pipe, []) + gates.get(pipe, []))
            for pipe in pipes:
                gates.setdefault(pipe, []).append(n)


