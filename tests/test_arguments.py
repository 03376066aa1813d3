"""The argument checks by themselves: what they return, and where their limits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.arguments import (
    INDEX_DTYPES,
    check_count,
    check_gather,
    check_host_visible_batch,
    check_vector,
)
from fused_slots.backends.base import Step
from fused_slots.faults import InvalidArgumentError, require_bool, require_int
from fused_slots.outputs import check_matrix, check_slots_out

CPU = torch.device("cpu")
INTS = (torch.int32, torch.int64)


def test_vector_returns_its_length() -> None:
    assert check_vector("v", torch.zeros(3, dtype=torch.int32), INTS, CPU) == 3
    assert check_vector("v", torch.zeros(0, dtype=torch.int64), INTS, CPU) == 0
    assert check_vector("v", torch.zeros(3, dtype=torch.int64), INTS, CPU, 3) == 3


def test_vector_of_one_element_is_contiguous_whatever_its_stride() -> None:
    assert check_vector("v", torch.zeros(6, dtype=torch.int64)[::6], INTS, CPU) == 1


@pytest.mark.parametrize("length", [0, 1, 2])
def test_vector_shorter_than_its_minimum(length: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"v: expected shape \[>= 3\].*\[{length}\]"):
        check_vector("v", torch.zeros(length, dtype=torch.int64), INTS, CPU, 3)


def test_matrix_may_be_larger_and_its_rows_apart() -> None:
    wide = torch.zeros(4, 10, dtype=torch.int32)
    for tensor in (wide, wide[:, 2:5], wide[:2], wide[::2], wide[:, :0]):
        check_matrix("m", tensor, INTS, CPU, (0, 0))
    check_matrix("m", torch.zeros(1, 3, dtype=torch.int32).expand(1, 3), INTS, CPU, (1, 3))
    check_matrix("m", torch.zeros(0, 3, dtype=torch.int32), INTS, CPU, (0, 3))


def test_matrix_names_what_is_wrong() -> None:
    wide = torch.zeros(4, 10, dtype=torch.int32)
    for tensor, message in (
        (wide[:, ::2], "contiguous rows"),
        (wide.t(), "contiguous rows"),
        (wide.as_strided((4, 5), (4, 1)), "do not overlap"),
        (wide[:1].expand(4, 10), "do not overlap"),
        (wide[:, :3], r"shape \[>= 4, >= 4\]; got shape \[4, 3\]"),
        (wide[:3], "shape"),
        (wide[0], "shape"),
        (wide.float(), "torch.float32"),
        (wide.to("meta"), "meta"),
        (wide.to_sparse(), "sparse_coo"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            check_matrix("m", tensor, INTS, CPU, (4, 4))


def test_count_accepts_its_bounds_and_numpy_integers() -> None:
    assert check_count("n", 0, 0, 3, "the size") == 0
    assert check_count("n", 3, 0, 3, "the size") == 3
    got = check_count("n", np.int64(2), 0, 3, "the size")  # type: ignore[arg-type]
    assert (got, type(got)) == (2, int)
    for value in (-1, 4):
        message = rf"\[0, 3\]; got {value}\. The maximum is the size"
        with pytest.raises(InvalidArgumentError, match=message):
            check_count("n", value, 0, 3, "the size")


def test_require_int_and_bool_give_python_values() -> None:
    assert type(require_int("n", np.int16(7), minimum=0)) is int
    assert require_int("n", 2**31 - 1, minimum=0) == 2**31 - 1
    assert require_bool("b", np.True_) is True
    assert require_bool("b", False) is False


def tables() -> AscendBlockTables:
    return AscendBlockTables.from_groups(
        [KVCacheGroup(16, 8), KVCacheGroup(64, 4, kernel_block_size=32)],
        max_num_reqs=4,
        max_num_batched_tokens=16,
    )


def test_rows_return_the_number_of_batch_entries() -> None:
    assert check_vector("idx_mapping", torch.zeros(3, dtype=torch.int64), INDEX_DTYPES, CPU) == 3
    assert check_vector("idx_mapping", torch.zeros(0, dtype=torch.int32), INDEX_DTYPES, CPU) == 0
    with pytest.raises(InvalidArgumentError, match=r"idx_mapping: expected torch\.int32"):
        check_vector("idx_mapping", torch.zeros(3), INDEX_DTYPES, CPU)


def test_gather_is_limited_by_the_rows_of_the_tables() -> None:
    layout = tables().layout
    check_gather(layout, CPU, 3, 4, None, None)
    with pytest.raises(InvalidArgumentError, match="idx_mapping: expected at most 4 entries"):
        check_gather(layout, CPU, 5, 5, None, None)
    out = (torch.zeros(3, 8, dtype=torch.int32), torch.zeros(9, 8, dtype=torch.int32))
    check_gather(layout, CPU, 3, 3, out, None)
    with pytest.raises(InvalidArgumentError, match="num_reqs_padded"):
        check_gather(layout, CPU, 3, 4, out, None)


def test_empty_out_tables_may_share_their_address() -> None:
    out = [torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 8, dtype=torch.int32)]
    check_gather(tables().layout, CPU, 0, 0, out, None)


@pytest.mark.parametrize(
    ("largest", "fits"), [(2**27 - 1, True), (2**27, False), (0, True), (2**31 - 1, False)]
)
def test_int32_out_fits_up_to_the_last_slot(largest: int, fits: bool) -> None:
    backend = tables()._backend
    out = torch.zeros(2, 4, dtype=torch.int32)
    check_slots_out(backend, CPU, out.long(), [largest, 0])
    if fits:
        check_slots_out(backend, CPU, out, [largest, 0])
    else:
        last_slot = (largest + 1) * 16 - 1
        with pytest.raises(InvalidArgumentError, match=f"group 0 .*{last_slot}"):
            check_slots_out(backend, CPU, out, [largest, 0])


def test_int32_out_that_misses_one_slot_is_refused() -> None:
    """A block size of 3 puts a last slot on 2**31 itself."""
    backend = AscendBlockTables.from_groups(
        [KVCacheGroup(3, 8)], max_num_reqs=1, max_num_batched_tokens=4
    )._backend
    out = torch.zeros(1, 4, dtype=torch.int32)
    check_slots_out(backend, CPU, out, [715827881])
    with pytest.raises(InvalidArgumentError, match="2147483648"):
        check_slots_out(backend, CPU, out, [715827882])


def test_batch_contents() -> None:
    starts = torch.tensor([0, 2, 2, 5, 4, 99], dtype=torch.int32)

    def check(num_reqs: int, num_positions: int, capacity: int, padded: int) -> None:
        positions = torch.zeros(num_positions, dtype=torch.int64)
        step = Step(None, starts, positions, num_tokens_padded=padded)
        check_host_visible_batch(num_reqs, step, capacity)

    check(3, 5, 5, 5)
    check(0, 0, 5, 0)
    for num_reqs, num_positions, capacity, message in (
        (4, 5, 5, "5 then 4 at batch entry 3"),
        (3, 4, 5, r"at least 5 entries \(query_start_loc\[3\]\); got 4"),
        (3, 5, 4, "at most 4 tokens; got 5"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            check(num_reqs, num_positions, capacity, capacity)
