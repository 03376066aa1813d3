"""Watched memory notices each kind of wrong access, and leaves right kernels alone."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.checked_memory import AccessError, CheckedMemory


@triton.jit
def copy(target_ptr, source_ptr, begin, end, offset, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = (lane >= begin) & (lane < end)
    value = tl.load(source_ptr + lane, mask=mask, other=0)
    tl.store(target_ptr + offset + lane, value, mask=mask)


@triton.jit
def write_one_place(target_ptr, source_ptr, same):
    x = tl.program_id(0)
    tl.store(target_ptr, tl.where(same != 0, 5, x))


@triton.jit
def pass_on(target_ptr, shared_ptr, used):
    """Each program writes its cell, and reads its neighbour's."""
    x = tl.program_id(0)
    tl.store(shared_ptr + x, 10 + x)
    seen = tl.load(shared_ptr + 1 - x)
    tl.store(target_ptr + x, tl.where(used != 0, seen, x))


@triton.jit
def count(target_ptr, read):
    x = tl.program_id(0)
    lanes = tl.arange(0, 4)
    tl.atomic_add(target_ptr + lanes * 0, 1, mask=lanes < 3)
    if (read != 0) & (x == 1):
        tl.store(target_ptr + 1, tl.load(target_ptr))


@triton.jit
def through_an_address(table_ptr, SIZE: tl.constexpr):
    target = tl.load(table_ptr).to(tl.pointer_type(tl.int32))
    tl.store(target + tl.arange(0, SIZE), 7)


@triton.jit
def last_one_sums(target_ptr, cells_ptr, arrivals_ptr, last):
    """Programs fill a cell each; the last to arrive adds them up and clears the counter."""
    x = tl.program_id(0)
    tl.store(cells_ptr + x, 1 + x)
    if tl.atomic_add(arrivals_ptr, 1) == last:
        tl.store(arrivals_ptr, 0)
        tl.store(target_ptr, tl.sum(tl.load(cells_ptr + tl.arange(0, 4)), axis=0))


def int32(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def test_accesses_inside_their_tensors_pass(memory: CheckedMemory) -> None:
    target = torch.zeros(10, dtype=torch.int32)
    copy[(3,)](target, int32(10), 0, 10, 0, SIZE=4)
    assert target.tolist() == list(range(10))
    assert memory.launches == 1
    assert memory.accesses == {"load": 10, "store": 10, "atomic": 0}


@pytest.mark.parametrize(
    ("begin", "end", "offset", "kind"),
    [(0, 11, -1, "load"), (-1, 3, 1, "load"), (0, 10, 1, "store"), (0, 10, -1, "store")],
)
def test_one_element_outside_is_an_error(begin: int, end: int, offset: int, kind: str) -> None:
    whole = torch.zeros(30, dtype=torch.int32)
    with pytest.raises(AccessError, match=f"a {kind} outside"):
        copy[(3,)](whole[10:20], int32(10), begin, end, offset, SIZE=4) if begin >= 0 else copy[
            (1,)
        ](whole[10:20], whole[20:30], 0, 11, 0, SIZE=16)


def test_gaps_of_a_view_and_forbidden_parts_are_outside(memory: CheckedMemory) -> None:
    whole = torch.zeros((3, 8), dtype=torch.int32)
    with pytest.raises(AccessError, match="a store outside"):
        copy[(3,)](whole[:, :4], int32(12), 0, 12, 0, SIZE=4)
    copy[(3,)](whole, int32(12), 0, 12, 0, SIZE=4)
    memory.forbid([whole[1, :2]])
    with pytest.raises(AccessError, match="2 places"):
        copy[(3,)](whole, int32(12), 0, 12, 0, SIZE=4)


def test_addresses_in_memory_must_be_lent(memory: CheckedMemory) -> None:
    target = torch.zeros(4, dtype=torch.int32)
    table = torch.tensor([target.data_ptr()], dtype=torch.int64)
    with memory.lend([target]):
        through_an_address[(1,)](table, SIZE=4)
    assert target.tolist() == [7] * 4
    with pytest.raises(AccessError, match="a store outside"):
        through_an_address[(1,)](table, SIZE=4)


def test_two_programs_may_write_one_place_with_one_value_only() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    write_one_place[(4,)](target, target, 1)
    with pytest.raises(AccessError, match="two stores of different values"):
        write_one_place[(4,)](target, target, 0)


def test_what_another_program_wrote_is_read_as_garbage(memory: CheckedMemory) -> None:
    seen = set()
    for _ in range(20):
        target, shared = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        pass_on[(2,)](target, shared, 1)
        seen.add(tuple(target.tolist()))
        assert shared.tolist() == [10, 11]
        pass_on[(2,)](target, shared, 0)
        assert target.tolist() == [0, 1]
    assert len(seen) > 4
    assert memory.garbage == 40


def test_plain_reads_of_a_counter_are_an_error() -> None:
    target = torch.zeros(2, dtype=torch.int32)
    count[(3,)](target, 0)
    assert target.tolist() == [9, 0]

    def count_and_read() -> None:
        for _ in range(20):  # an error unless the reader happens to be the last to count
            count[(3,)](target, 1)

    with pytest.raises(AccessError, match="counted by another"):
        count_and_read()


def test_the_last_to_arrive_sees_what_the_others_did(memory: CheckedMemory) -> None:
    for _ in range(10):
        target, cells = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        arrivals = torch.zeros(1, dtype=torch.int32)
        last_one_sums[(4,)](target, cells, arrivals, 3)
        assert (target.item(), arrivals.item()) == (10, 0)
    assert memory.garbage == 0
    with pytest.raises(AccessError, match="counted by another"):
        last_one_sums[(4,)](target, cells, arrivals, 2)


def test_programs_run_in_an_order_of_the_seed(memory: CheckedMemory) -> None:
    def last_writer(seed: int | None) -> list[int]:
        memory.shuffle(seed)
        order = []
        original = triton.runtime.interpreter.interpreter_builder.set_grid_idx
        with pytest.MonkeyPatch.context() as patch:
            builder = triton.runtime.interpreter.interpreter_builder
            patch.setattr(
                builder, "set_grid_idx", lambda x, y, z: (order.append(x), original(x, y, z))
            )
            copy[(6,)](torch.zeros(24, dtype=torch.int32), int32(24), 0, 24, 0, SIZE=4)
        return order

    assert last_writer(None) == list(range(6))
    assert last_writer(4) == last_writer(4) != list(range(6))
    assert sorted(last_writer(5)) == list(range(6))
