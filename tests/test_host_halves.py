"""The native half of staging and the one in Python: equal in everything, and who chooses."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import sysconfig
import tracemalloc
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.faults import BackendUnavailableError, BlockTableError, ConfigurationError
from fused_slots.host import rows
from fused_slots.host.rows import HostRows, host_half
from fused_slots.layout import TableLayout
from tests.host_halves import HALVES, staged_by
from tests.staging_fuzz import fuzz
from tests.test_injected_faults import run_without

ROWS = 4
GROUPS = (
    KVCacheGroup(16, 6),
    KVCacheGroup(32, 5, kernel_block_size=16),
    KVCacheGroup(48, 2, kernel_block_size=16, slot_mapping_mode=SlotMappingMode.NONE),
)
needs_native = pytest.mark.skipif("native" not in HALVES, reason="the native half is not built")


def layout(num_groups: int = len(GROUPS), max_num_reqs: int = ROWS) -> TableLayout:
    return TableLayout(
        groups=GROUPS[:num_groups],
        widths=(6, 10, 6)[:num_groups],
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=4,
        context_parallel=ContextParallel(),
        replay_window=0,
        slot_dtype=torch.int64,
        num_blocks=(30, None, 20)[:num_groups],
    )


def make_rows(half: str, **sizes: int) -> HostRows:
    with staged_by(half):
        return HostRows(layout(**sizes))


class Index(int):
    """An int of another type."""


block_id = st.integers(0, 19)
odd_id = st.one_of(
    block_id.map(np.int32),
    block_id.map(np.int64),
    block_id.map(Index),
    st.integers(),
    st.sampled_from((-1, 20, 29, 30, 2**30, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63))),
    st.booleans(),
    st.floats(),
    st.none(),
    st.text(max_size=1),
)
ids = st.lists(block_id, max_size=3)
odd_ids = st.one_of(
    st.lists(st.one_of(block_id, odd_id), max_size=4),
    ids.map(tuple),
    ids.map(lambda values: array("q", values)),
    ids.map(np.array),
    ids.map(lambda values: np.array(values, dtype=np.int32)),
    st.integers(0, 8).map(range),
    st.lists(block_id, max_size=14),
    st.sampled_from((None, 5, "12", b"12", {1: 2}, np.array(3))),
)
lists = st.tuples(ids, ids, ids)
odd_lists = st.one_of(
    st.tuples(odd_ids, ids, odd_ids),
    lists.map(list),
    lists.map(lambda values: values[:2]),
    st.sampled_from((None, 3, "abc", (), [[1]] * 4)),
    st.just(np.arange(6).reshape(3, 2)),
)
row = st.integers(0, ROWS - 1)
stages = st.tuples(
    st.just("stage"),
    st.one_of(row, row, row.map(np.int64), st.sampled_from((-1, ROWS, 2**70, True, None, 1.0))),
    st.one_of(lists, lists, odd_lists),
    st.one_of(st.booleans(), st.booleans(), st.sampled_from((np.True_, 0, None))),
)
first_blocks = st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1))
odd_first = st.sampled_from(
    (None, 3, (), (0, 0), (0, None, 0), (True, 0, 0), (0, -1, 0), (9, 9, 9))
)
any_row = st.one_of(row, row, row.map(np.int64), st.sampled_from((-1, ROWS, 2**70, True, None)))
writes = st.tuples(
    st.just("write"),
    any_row,
    st.one_of(first_blocks, first_blocks, first_blocks.map(np.array), odd_first),
    st.one_of(lists, lists, odd_lists),
)
calls = st.one_of(
    stages,
    stages,
    stages,
    stages,
    writes,
    writes,
    st.tuples(st.just("clear_row"), any_row),
    st.sampled_from((("collect",), ("pack",), ("clear",), ("clear",), ("forget_device",))),
    # Callers may shorten rows themselves (fused_slots/vllm/v1_storage.py).
    st.tuples(st.just("cut"), row, st.integers(0, 2), st.integers(0, 2)),
)


def outcome(half: HostRows, call: tuple[Any, ...]) -> Any:
    """Do a call; what it returned or raised, comparable."""
    try:
        if call[0] == "stage":
            return half.stage(*call[1:])
        if call[0] in ("write", "clear_row", "clear", "forget_device"):
            return getattr(half, call[0])(*call[1:])
        if call[0] == "cut":
            _, req_index, g, length = call
            half.num_columns[g, req_index] = min(length, half.num_columns[g, req_index])
            return None
        if call[0] == "collect":
            writes = vars(half.collect())
            return {name: (values.dtype, values.tolist()) for name, values in writes.items()}
        packet = np.full(half.packet_size + 2, -9, dtype=np.int32)
        return half.pack(packet), packet.tolist()
    except BlockTableError as error:
        return type(error), str(error)


def state(half: HostRows) -> dict[str, Any]:
    return {
        "lengths": half.num_columns.tolist(),
        "largest": half.largest_ids,
        "pending": half.pending,
        "rows": (half.staged_rows, half.staging.rows, half.num_staged_rows),
        "packet": outcome(half, ("pack",)),
        "size": half.packet_size,
        "cells": half._cells.tolist(),
    }


@needs_native
@settings(max_examples=400)
@given(st.lists(calls, max_size=25))
def test_any_calls_have_the_same_results_errors_and_packets(sequence: list[Any]) -> None:
    native, python = make_rows("native"), make_rows("python")
    for call in sequence:
        assert outcome(native, call) == outcome(python, call), call
        assert state(native) == state(python), call


@needs_native
def test_hostile_and_reentrant_calls_are_those_of_the_python_half() -> None:
    """A part of `make test-sanitizers`, without the sanitizers."""
    counted = fuzz(1_500, seed=7)
    assert min(counted[kind] for kind in ("stage", "write", "clear_row", "pack")) > 50
    assert counted["BlockIdError"] > 50


@needs_native
def test_voided_runs_leave_the_others_as_they_were_when_memory_grows() -> None:
    native, python = make_rows("native"), make_rows("python")
    for step in range(400):
        # Rows 0 to 2 are started anew again and again, row 3 keeps its first blocks.
        row, fresh = (3, step < 40) if step % 10 == 0 else (step % 3, step % 7 < 3)
        call = ("stage", row, [[step % 30], [step % 5] * (step % 2), []], fresh)
        assert outcome(native, call) == outcome(python, call)
        assert state(native) == state(python)


@pytest.mark.parametrize("half", HALVES)
def test_a_packet_is_laid_out_as_documented(half: str) -> None:
    staged = make_rows(half)
    staged.stage(2, [[7], [4], []], True)
    staged.clear()
    staged.stage(2, [[8, 9], [], []], False)
    staged.stage(0, [[1], [], [2]], True)
    staged.stage(2, [[5], [3], []], False)
    packet = np.empty(staged.packet_size, dtype=np.int32)
    assert staged.pack(packet) == 3
    row_records, lines, records, ids = np.split(packet, [ROWS, ROWS + 4, ROWS + 4 + 18])
    assert row_records.tolist() == [1, -1, 0, -1]
    assert lines.tolist() == [2, 1, 0, 1]
    assert records.reshape(2, 3, 3).tolist() == [
        [[1, 4, 0], [2, 4, 3], [0, 0, 5]],
        [[0, 1, 5], [0, 0, 6], [0, 3, 6]],
    ]
    assert ids.tolist() == [8, 9, 5, 6, 7, 1, 6, 7, 8]


@pytest.mark.parametrize("half", HALVES)
def test_a_row_written_from_a_block_on_has_the_columns_behind_that_block(half: str) -> None:
    staged = make_rows(half)
    staged.stage(1, [[1, 2, 3], [4, 5], [6]], True)
    staged.clear()
    assert staged.collect().generations.tolist() == []
    staged.write(1, [3, 2, 1], [[], [], []])
    assert not staged.pending  # nothing has changed
    staged.write(1, [3, 2, 1], [[9], [], []])
    writes = staged.collect()
    assert (writes.starts.tolist(), writes.generations.tolist()) == ([[3, 4, 3]], [1])
    staged.write(1, [2, 1, 1], [[7, 8], [], []])
    writes = staged.collect()
    assert writes.generations.tolist() == [2]  # columns below its old end are others now
    assert writes.filled.tolist() == [[4, 2, 3]]
    assert writes.starts.tolist() == [[2, 2, 3]]
    assert writes.column_ids.tolist() == [7, 8]
    staged.stage(1, [[], [3], []], False)
    staged.write(1, [3, 2, 0], [[], [1], [2]])
    writes = staged.collect()
    assert writes.starts.tolist() == [[2, 2, 0]]
    assert writes.column_ids.tolist() == [7, 6, 7, 2, 3, 6, 7, 8]
    staged.write(1, [0, 0, 0], [[], [0], []])
    assert staged.collect().column_ids.tolist() == [0, 1]


@pytest.mark.parametrize("half", HALVES)
def test_a_row_given_back_is_empty_and_its_state_cells_become_zero(half: str) -> None:
    staged = make_rows(half)
    staged.stage(1, [[1, 2, 3], [4, 5], [6, 7]], True)
    staged.clear()
    staged.stage(1, [[1], [4], [6]], True)
    staged.clear()
    staged.stage(2, [[1], [], []], True)
    staged.clear_row(1)
    for _ in range(2):  # what was packed and not applied is packed again
        writes = staged.collect()
        assert writes.rows.tolist() == [2, 1]
        assert writes.filled.tolist() == [[1, 0, 0], [0, 0, 0]]
        # The row had six cells once, whatever it held last.
        assert writes.starts.tolist() == [[0, 0, 0], [0, 0, -6]]
        assert writes.column_ids.tolist() == [1, *[0] * 6]
        assert writes.generations.tolist() == [1, 3]
        elements = writes.destinations(layout()).tolist()
        assert elements == [12, *range(layout().offsets[2] + 6, layout().offsets[2] + 12)]
    staged.clear()
    staged.clear_row(1)
    assert staged.collect().starts.tolist() == [[0, 0, 0]]  # they are zero already
    staged.clear()
    staged.forget_device()
    staged.clear_row(1)
    assert staged.collect().starts.tolist() == [[0, 0, -6]]
    staged.stage(1, [[], [], [2]], False)  # live again before it was applied
    assert staged.collect().column_ids.tolist() == [6, 7, 8]


@pytest.mark.parametrize("half", HALVES)
def test_a_row_given_back_staged_and_shortened_is_written_no_further_than_staged(half: str) -> None:
    staged = make_rows(half)
    staged.clear_row(0)
    staged.stage(0, [[], [], [4, 5]], False)
    staged.num_columns[2, 0] = 0  # by a caller, not here
    packet = np.full(staged.packet_size, -9, dtype=np.int32)
    assert staged.pack(packet) == 6
    assert packet[-6:].tolist() == [12, 13, 14, 15, 16, 17]
    assert staged.collect().starts.tolist() == [[0, 0, -6]]


@needs_native
def test_a_cycle_through_the_native_half_is_collected() -> None:
    class Plain:
        def __call__(self, *request: object) -> object:
            return request

    plain = Plain()
    plain.native = rows.NativeStaging(*native_arguments(plain=plain))  # type: ignore[attr-defined]
    gone = weakref.ref(plain)
    del plain
    gc.collect()
    assert gone() is None


@needs_native
def test_garbage_that_calls_the_native_half_finds_no_rows() -> None:
    """The collector takes it apart before its neighbour's last words."""
    heard: list[object] = []

    class Plain:
        def __del__(self) -> None:
            native = self.native  # type: ignore[attr-defined]
            native.clear()
            heard.append((native.pending, native.rows, native.num_rows))

    plain = Plain()
    plain.native = rows.NativeStaging(*native_arguments(plain=plain))  # type: ignore[attr-defined]
    plain.native.stage(1, [[1], [1]], True)  # type: ignore[attr-defined]
    del plain
    gc.collect()
    assert heard == [(False, [], 0)]


@pytest.mark.parametrize("half", HALVES)
def test_a_packet_too_small_is_refused(half: str) -> None:
    staged = make_rows(half)
    staged.stage(1, [[7], [4], []], True)
    with pytest.raises(ValueError, match="the packet is too small"):
        staged.pack(np.empty(staged.packet_size - 1, dtype=np.int32))


@pytest.mark.parametrize("half", HALVES)
def test_no_groups_stage_rows_all_the_same(half: str) -> None:
    staged = make_rows(half, num_groups=0)
    staged.stage(1, [], False)
    assert not staged.pending
    staged.stage(1, (), True)
    assert staged.staged_rows == {1}
    assert staged.collect().generations.tolist() == [1]


@needs_native
def test_what_is_no_buffer_of_int32_is_refused() -> None:
    native = make_rows("native")
    native.stage(1, [[7], [4], []], True)
    memory = np.zeros(4 * native.packet_size + 4, dtype=np.int8)
    with pytest.raises(ValueError, match="not aligned"):
        native.pack(memory[1:])
    with pytest.raises(TypeError, match="bytes-like"):
        native.pack([0] * native.packet_size)  # type: ignore[arg-type]
    fixed = np.zeros(native.packet_size, dtype=np.int32)
    fixed.flags.writeable = False
    with pytest.raises((ValueError, BufferError), match=r"read-only|not writable"):
        native.pack(fixed)
    strided = np.zeros(2 * native.packet_size, dtype=np.int32)[::2]
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        native.pack(strided)


@needs_native
@pytest.mark.parametrize("name", ["lengths", "generations", "cells"])
def test_a_packet_in_the_memory_that_it_is_made_of_is_refused(name: str) -> None:
    """While the cells of a row change, so does the number of zeros that are written."""
    memory = {
        "lengths": np.zeros((64, 2), dtype=np.int32),
        "generations": np.zeros(64, dtype=np.int32),
        "cells": np.zeros((64, 2), dtype=np.int32),
    }
    around = np.zeros(400, dtype=np.int32)
    shape = memory[name].shape
    memory[name] = around[100 : 100 + memory[name].size].reshape(shape)
    native = rows.NativeStaging(*native_arguments(**memory))
    native.stage(1, [[1], [1]], True)
    native.clear()
    native.clear_row(1)
    first, last = 100, 100 + memory[name].size
    for begin, end in ((0, first + 1), (first, first + 200), (last - 1, 400), (0, 400)):
        before = around.copy()
        with pytest.raises(ValueError, match="in the rows' own memory"):
            native.pack(around[begin:end])
        assert np.array_equal(around, before)
    for beside in (around[:first], around[last:]):
        assert native.pack(beside) == 2


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("call", ["stage", "write", "clear_row"])
def test_a_generation_wraps_whatever_warnings_do(half: str, call: str) -> None:
    staged = make_rows(half)
    staged.stage(1, [[1], [], []], False)
    staged.generations[1] = 2**31 - 1
    arguments = {
        "stage": (1, [[2], [], []], True),
        "write": (1, [0, 0, 0], [[2], [], []]),
        "clear_row": (1,),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(staged, call)(*arguments[call])
    assert staged.collect().generations.tolist() == [-(2**31)]
    assert staged.num_columns[0, 1] == (call != "clear_row")


def native_arguments(**changed: Any) -> list[Any]:
    arguments = {
        "plain": lambda *request: request,
        "lengths": np.zeros((ROWS, 2), dtype=np.int32),
        "generations": np.zeros(ROWS, dtype=np.int32),
        "largest_ids": np.zeros(2, dtype=np.int32),
        "cells": np.zeros((ROWS, 2), dtype=np.int32),
        "limits": np.array([[1, 6, 9, 0], [2, 6, 9, 1]], dtype=np.int64),
    }
    return list({**arguments, **changed}.values())


@needs_native
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": np.zeros((ROWS, 3), dtype=np.int32)}, "sizes do not agree"),
        ({"largest_ids": np.zeros(1, dtype=np.int32)}, "sizes do not agree"),
        ({"cells": np.zeros((ROWS, 3), dtype=np.int32)}, "sizes do not agree"),
        ({"limits": np.array([[0, 6, 9, 0], [2, 6, 9, 1]])}, "outside int32"),
        ({"limits": np.array([[1, 2**31, 9, 0], [2, 6, 9, 1]])}, "outside int32"),
        ({"limits": np.array([[1, 6, 9, 0], [2, 6, 2**30, 1]])}, "outside int32"),
        ({"limits": np.array([[1, 6, -1, 0], [2, 6, 9, 1]])}, "outside int32"),
        ({"lengths": np.zeros(4 * ROWS * 2 + 4, dtype=np.int8)[1:-3]}, "not aligned"),
    ],
)
def test_the_native_half_checks_what_it_is_built_from(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows.NativeStaging(*native_arguments(**changed))


@needs_native
def test_a_plain_form_that_is_none_is_not_staged() -> None:
    for answer in (None, (0, [[1]], True), (0, [[1], ["a"]], True), (0, [[1], [1]])):
        native = rows.NativeStaging(*native_arguments(plain=lambda *_, answer=answer: answer))
        with pytest.raises(RuntimeError, match="not accepted"):
            native.stage(0, None, True)  # type: ignore[arg-type]
        assert not native.pending


@needs_native
def test_the_native_half_takes_three_arguments() -> None:
    with pytest.raises(TypeError, match="3 arguments, got 2"):
        make_rows("native").stage(0, [[1], [], []])  # type: ignore[call-arg]


class Meddling(list[int]):
    """A list of ids that makes another call when it is read."""

    def __init__(self, ids: list[int], call: Callable[[], object]) -> None:
        super().__init__(ids)
        self.call = call

    def __iter__(self) -> Iterator[int]:
        self.call()
        return super().__iter__()


@pytest.mark.parametrize("half", HALVES)
def test_a_call_within_a_call_comes_first_and_leaves_the_other_whole(half: str) -> None:
    staged, expected = make_rows(half), make_rows(half)
    ids = Meddling([3], lambda: staged.stage(1, [[9], [], []], False))
    staged.stage(1, [[1], ids, []], False)
    for each in ([[9], [], []], [[9], [], []], [[1], [3], []]):  # they are read twice
        expected.stage(1, each, False)
    assert state(staged) == state(expected)
    cleared = Meddling([4], staged.clear)
    staged.stage(2, [[], cleared, []], True)
    expected.clear()
    expected.stage(2, [[], [4], []], True)
    assert state(staged) == state(expected)


@pytest.mark.parametrize("half", HALVES)
def test_a_call_within_a_call_that_takes_its_room_leaves_nothing_of_it(half: str) -> None:
    staged, expected = make_rows(half), make_rows(half)
    full = [[1] * 6, [], []]
    ids = Meddling([3], lambda: staged.stage(1, full, True))
    for each in (staged, expected):
        each.stage(0, [[2], [2], [2]], True)
    with pytest.raises(RuntimeError, match="not accepted"):
        staged.stage(1, [[1], ids, []], False)
    expected.stage(1, full, True)
    expected.stage(1, full, True)
    assert state(staged) == state(expected)


@needs_native
def test_more_columns_than_offsets_reach_are_refused() -> None:
    limits = np.array([[2**20, 2**31 - 1, 9, 0], [2**20, 2**31 - 1, 9, 1]])
    native = rows.NativeStaging(*native_arguments(limits=limits))
    native.stage(0, [[0] * 2047, [0]], False)
    packet = np.empty(64, dtype=np.int32)
    with pytest.raises(OverflowError, match="int32 offsets"):
        native.pack(packet)
    native.stage(0, [[], [0]], True)
    assert native.packet_size == ROWS + 8 + 2**20
    with pytest.raises(ValueError, match="too small"):
        native.pack(packet)


@needs_native
def test_many_steps_keep_no_reference_and_no_memory() -> None:
    staged = make_rows("native", max_num_reqs=400)
    packet = np.empty(8192, dtype=np.int32)
    numbers = [10**9 + i for i in range(3)]  # not of the small ints that never die
    lists = [numbers, [numbers[0]], []]
    plain_ids, array_ids = [[17, 5], [9], [2]], [np.array([17, 5]), [9], (2,)]

    def steps(count: int) -> None:
        for step in range(count):
            row = 300 + step % 64  # nor are these
            staged.stage(row, plain_ids, True)
            staged.stage(row, plain_ids, step % 3 == 0)
            if step % 20 == 0:
                staged.stage(row, array_ids, True)
                assert staged.staged_rows
                with pytest.raises(BlockTableError):
                    staged.stage(row, lists, False)
            if step % 5 == 0:
                staged.pack(packet)
                staged.clear()

    steps(600)
    gc.collect()
    held = [sys.getrefcount(value) for value in (*numbers, *lists, *plain_ids, packet)]
    tracemalloc.start()
    try:
        steps(600)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        steps(100_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(value) for value in (*numbers, *lists, *plain_ids, packet)] == held
    assert after - before < 4096


@needs_native
def test_the_native_half_is_traced_and_freed() -> None:
    """Its memory is seen by tracemalloc, or the test above would see nothing."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        staged = rows.NativeStaging(
            *native_arguments(
                lengths=np.zeros((ROWS, 1), dtype=np.int32),
                largest_ids=np.zeros(1, dtype=np.int32),
                cells=np.zeros((ROWS, 1), dtype=np.int32),
                limits=np.array([[1, 2**31 - 1, 9, 0]]),
            )
        )
        staged.stage(0, [[5] * 100_000], False)
        during, _ = tracemalloc.get_traced_memory()
        assert during - before > 400_000
        del staged
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 4096
        arguments = native_arguments()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(2_000):
            rows.NativeStaging(*arguments).stage(0, [[1], [1]], True)
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 4096
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("half", HALVES)
def test_a_row_overwritten_without_end_keeps_its_memory(half: str) -> None:
    """Void runs are dropped, also when nobody applies them."""
    staged = make_rows(half)
    staged.stage(3, [[1], [2], [3]], True)
    for step in range(3_000):
        staged.stage(0, [[step % 30, 1], [step % 9], [7]], True)
        if step == 100:
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 4096
    assert staged.collect().column_ids.tolist()[-7:] == [2999 % 30, 1, 4, 5, 21, 22, 23]


@needs_native
def test_the_native_half_holds_nothing_when_it_is_gone() -> None:
    calls: list[object] = []

    def plain(*request: object) -> tuple[object, ...]:
        calls.append(request)
        return (0, [[1], [2]], True)

    held = sys.getrefcount(plain)
    lengths = np.zeros((ROWS, 2), dtype=np.int32)
    held_lengths, held_type = sys.getrefcount(lengths), sys.getrefcount(rows.NativeStaging)
    for _ in range(50):
        native = rows.NativeStaging(*native_arguments(plain=plain, lengths=lengths))
        native.stage(0, None, 1)  # type: ignore[arg-type]
        del native
        with pytest.raises(ValueError, match="do not agree"):
            rows.NativeStaging(
                *native_arguments(plain=plain, lengths=lengths, largest_ids=np.zeros(9, np.int32))
            )
    calls.clear()
    assert (sys.getrefcount(plain), sys.getrefcount(lengths)) == (held, held_lengths)
    assert sys.getrefcount(rows.NativeStaging) < held_type + 10  # its callers may cache it


def build() -> AscendBlockTables:
    return AscendBlockTables.from_groups(GROUPS, max_num_reqs=2, max_num_batched_tokens=4)


def test_the_half_is_chosen_when_a_manager_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for half in HALVES:
        monkeypatch.setenv("FUSED_SLOTS_HOST", half)
        assert host_half() == half
        expected = {"python": "PythonStaging", "native": "Staging"}[half]
        assert type(build()._rows.staging).__name__ == expected
    monkeypatch.setenv("FUSED_SLOTS_HOST", "auto")
    assert host_half() == HALVES[-1]
    monkeypatch.setenv("FUSED_SLOTS_HOST", "rust")
    with pytest.raises(ConfigurationError, match="FUSED_SLOTS_HOST: expected auto or native"):
        build()


def test_a_missing_native_half_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "NATIVE", False)
    monkeypatch.setenv("FUSED_SLOTS_HOST", "native")
    with pytest.raises(BackendUnavailableError, match="FUSED_SLOTS_HOST=native") as raised:
        build()
    assert "C compiler" in raised.value.hint
    monkeypatch.setenv("FUSED_SLOTS_HOST", "auto")
    assert type(build()._rows.staging).__name__ == "PythonStaging"


def test_the_package_works_where_nothing_was_compiled() -> None:
    script = (
        "import sys; sys.modules['fused_slots.host._staging'] = None\n"
        "from fused_slots.host import rows\n"
        "print(rows.NATIVE, rows.host_half())\n"
    )
    assert run_without("no-package", script, FUSED_SLOTS_HOST="auto") == "False python"


@pytest.mark.skipif(
    shutil.which(sysconfig.get_config_var("CC").split()[0]) is None, reason="no C compiler here"
)
def test_the_native_half_is_built_where_a_compiler_is_and_without_a_warning(
    tmp_path: Path,
) -> None:
    assert "native" in HALVES, "reinstall the package: a compiler is here"
    source = Path(rows.__file__).parent / "_staging.c"
    command = [*sysconfig.get_config_var("CC").split(), "-c", "-std=c99", "-O2", "-fPIC"]
    command += ["-Wall", "-Wextra", "-Wconversion", f"-I{sysconfig.get_path('include')}"]
    for macros in ([], ["-DPy_LIMITED_API=0x030B0000"]):
        done = subprocess.run(
            [*command, *macros, str(source), "-o", str(tmp_path / "staging.o")],
            capture_output=True,
            text=True,
            check=False,
        )
        # Of Python's own headers nothing is said here.
        assert done.returncode == 0, done.stderr
        assert not re.findall(r"_staging\.c:\d+.*", done.stderr)
