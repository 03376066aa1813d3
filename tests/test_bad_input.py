"""Malformed calls: each a typed error that names what was wrong, each leaving nothing behind.

And the complement: calls that look odd but that the contract allows.
"""

from __future__ import annotations

import re
from array import array
from collections import UserList
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fused_slots import (
    AscendBlockTables,
    BlockTableError,
    ContextParallel,
    KVCacheGroup,
    SlotMappingMode,
)
from fused_slots.faults import (
    BackendUnavailableError,
    BlockIdError,
    ConfigurationError,
    InvalidArgumentError,
    RowCapacityError,
)
from tests.backends_under_test import (
    BACKENDS,
    MakeTables,
    batch_tensors,
    gathered,
    int32,
    int64,
    slots,
)
from tests.host_halves import HALVES, staged_by

GROUPS = [
    KVCacheGroup(block_size=16, max_num_blocks=8, name="full"),
    KVCacheGroup(block_size=64, max_num_blocks=4, kernel_block_size=32, sliding_window_reach=40),
]
INT32_MIN = -(2**31)


@pytest.fixture(params=BACKENDS, ids=str)
def make_tables(request: pytest.FixtureRequest) -> MakeTables:
    return request.param


@pytest.fixture
def half(request: pytest.FixtureRequest) -> Iterator[None]:
    """The half of staging that managers get: any, where a test does not name it."""
    with staged_by(getattr(request, "param", "auto")):
        yield


@pytest.fixture
def tables(make_tables: MakeTables, half: None) -> AscendBlockTables:
    """A manager with two live rows, gathered tables, slots, drafts, and a write pending."""
    rows = {0: [[5, 6], [3]], 1: [[7], [4, 2]]}
    tables = make_tables(GROUPS, rows, num_blocks=[100, None], replay_window=4)
    slots(tables, [(0, [0, 1]), (1, [2])])
    gathered(tables, [0, 1])
    tables.map_tokens(int32(tables, [0]), int64(tables, [3]))
    tables.append_block_ids(2, [[9], [9]], overwrite=True)
    return tables


def snapshot(tables: AscendBlockTables) -> list[Any]:
    """Everything a refused call must leave alone."""
    backend, rows = tables._backend, tables._rows
    buffers = [
        backend.arena,
        backend.input_arena,
        backend.num_columns,
        backend.slot_mappings,
        backend.draft_slot_mappings,
    ]
    staged = rows.collect()
    return [
        *(buffer.tolist() for buffer in buffers),
        *(buffer.data_ptr() for buffer in buffers),
        tables.num_blocks.np.tolist(),
        *(values.tolist() for values in vars(staged).values()),
        rows.pending,
        list(rows.largest_ids),
        tables.launches,
        tables.redirect_writes_to_null_block,
    ]


def assert_refused(
    call: Callable[[], object], error: type[BlockTableError], argument: str, message: str
) -> BlockTableError:
    """The call raises exactly this type, names the argument, and its text matches."""
    with pytest.raises(BlockTableError, match=message) as raised:
        call()
    assert type(raised.value) is error
    assert argument in raised.value.argument
    assert raised.value.expected
    assert raised.value.actual
    return raised.value


def append(tables: AscendBlockTables, **changed: Any) -> None:
    arguments = {"req_index": 0, "new_block_ids": [[8], [8]], "overwrite": False, **changed}
    tables.append_block_ids(**arguments)


BAD_APPENDS: dict[str, tuple[dict[str, Any], type[BlockTableError], str, str]] = {
    "row is the number of rows": (
        {"req_index": 4},
        InvalidArgumentError,
        "req_index",
        r"\[0, 4\); got 4.*max_num_reqs",
    ),
    "row negative": ({"req_index": -1}, InvalidArgumentError, "req_index", "got -1"),
    "row float": ({"req_index": 1.0}, InvalidArgumentError, "req_index", r"got 1\.0"),
    "row bool": ({"req_index": True}, InvalidArgumentError, "req_index", "got True"),
    "row None": ({"req_index": None}, InvalidArgumentError, "req_index", "got None"),
    "row str": ({"req_index": "0"}, InvalidArgumentError, "req_index", "got '0'"),
    "row beyond int64": ({"req_index": 2**70}, InvalidArgumentError, "req_index", "got 118"),
    "row a tensor": (
        {"req_index": torch.tensor(0)},
        InvalidArgumentError,
        "req_index",
        r"got tensor\(0\)",
    ),
    "too few groups": (
        {"new_block_ids": [[8]]},
        InvalidArgumentError,
        "new_block_ids of request row 0",
        "expected 2 lists, one per KV cache group; got 1",
    ),
    "too many groups": (
        {"new_block_ids": [[8], [8], [8]]},
        InvalidArgumentError,
        "new_block_ids",
        "got 3",
    ),
    "groups None": ({"new_block_ids": None}, InvalidArgumentError, "new_block_ids", "NoneType"),
    "groups a generator": (
        {"new_block_ids": (ids for ids in ([8], [8]))},
        InvalidArgumentError,
        "new_block_ids",
        "generator",
    ),
    "groups a number": ({"new_block_ids": 8}, InvalidArgumentError, "new_block_ids", "got int"),
    "groups a str": ({"new_block_ids": "88"}, InvalidArgumentError, "new_block_ids", "got str"),
    "groups a 0-d array": (
        {"new_block_ids": np.array(8)},
        InvalidArgumentError,
        "new_block_ids",
        "ndarray",
    ),
    "flat ids": ({"new_block_ids": [8, 8]}, BlockIdError, "group 0", "a list of block ids"),
    "ids None": ({"new_block_ids": [[8], None]}, BlockIdError, "group 1", "got NoneType"),
    "ids a generator": (
        {"new_block_ids": [[8], (i for i in [8])]},
        BlockIdError,
        "group 1",
        "got generator",
    ),
    "ids a set": ({"new_block_ids": [{8, 9}, [8]]}, BlockIdError, "group 0", "got set"),
    "ids bytes": ({"new_block_ids": [b"\x08", [8]]}, BlockIdError, "group 0", "got bytes"),
    "ids a 0-d array": (
        {"new_block_ids": [np.array(8), [8]]},
        BlockIdError,
        "group 0",
        "got ndarray",
    ),
    "ids a 2-d array": (
        {"new_block_ids": [np.array([[1, 2], [3, 4]]), [8]]},
        BlockIdError,
        "group 0 (full), entry 0",
        r"an int; got array\(\[1, 2\]\)",
    ),
    "ids a tensor": (
        {"new_block_ids": [torch.tensor([8]), [8]]},
        BlockIdError,
        "group 0",
        "got Tensor",
    ),
    "ids a meta tensor": (
        {"new_block_ids": [torch.empty(1, dtype=torch.int32, device="meta"), [8]]},
        BlockIdError,
        "group 0",
        "got Tensor",
    ),
    "id negative": (
        {"new_block_ids": [[8], [3, -1]]},
        BlockIdError,
        "request row 0, group 1, entry 1",
        r"block id in \[0, .*got -1\. Block ids are non-negative",
    ),
    "id of the pool's size": (
        {"new_block_ids": [[8, 100], [8]]},
        BlockIdError,
        "request row 0, group 0 (full), entry 1",
        r"\[0, 99\]; got 100\. .*num_blocks=100",
    ),
    "id beyond int32": (
        {"new_block_ids": [[8], [2**31]]},
        BlockIdError,
        "group 1",
        "got 2147483648",
    ),
    "id whose columns leave int32": (
        {"new_block_ids": [[8], [2**30]]},
        BlockIdError,
        "group 1",
        r"\[0, 1073741823\].*columns must fit the int32 block table",
    ),
    "id beyond int64": ({"new_block_ids": [[8], [2**70]]}, BlockIdError, "group 1", "got 118"),
    "id float": ({"new_block_ids": [[8.0], [8]]}, BlockIdError, "entry 0", r"an int; got 8\.0"),
    "id NaN": ({"new_block_ids": [[float("nan")], [8]]}, BlockIdError, "entry 0", "got nan"),
    "id str": ({"new_block_ids": [[8, "8"], [8]]}, BlockIdError, "entry 1", "got '8'"),
    "id None": ({"new_block_ids": [[8], [None]]}, BlockIdError, "group 1, entry 0", "got None"),
    "id bool": ({"new_block_ids": [[8, True], [8]]}, BlockIdError, "entry 1", "got True"),
    "id of a bool array": (
        {"new_block_ids": [np.array([True]), [8]]},
        BlockIdError,
        "entry 0",
        "True",
    ),
    "id of a float array": (
        {"new_block_ids": [np.array([8.5]), [8]]},
        BlockIdError,
        "entry 0",
        r"8\.5",
    ),
    "row over capacity": (
        {"new_block_ids": [[8] * 7, [8]]},
        RowCapacityError,
        "request row 0, group 0 (full)",
        r"at most 8 columns.*9 > 8 \(2 filled, 7 new\).*max_num_blocks",
    ),
    "row over capacity through splitting": (
        {"new_block_ids": [[8], [8, 9, 10, 11]]},
        RowCapacityError,
        "group 1",
        r"10 > 8 \(2 filled, 8 new\)",
    ),
    "row over capacity at overwrite": (
        {"new_block_ids": [[8] * 9, [8]], "overwrite": True},
        RowCapacityError,
        "group 0",
        r"9 > 8 \(0 filled, 9 new\)",
    ),
    "overwrite a str": ({"overwrite": "no"}, InvalidArgumentError, "overwrite", "got 'no'"),
    "overwrite None": ({"overwrite": None}, InvalidArgumentError, "overwrite", "got None"),
    "overwrite an array": (
        {"overwrite": np.array([True, False])},
        InvalidArgumentError,
        "overwrite",
        "True or False",
    ),
}


@pytest.mark.parametrize("half", HALVES, indirect=True)
@pytest.mark.parametrize("case", BAD_APPENDS.values(), ids=BAD_APPENDS.keys())
def test_bad_append_is_refused_and_changes_nothing(
    tables: AscendBlockTables, case: tuple[dict[str, Any], type[BlockTableError], str, str]
) -> None:
    changed, error, argument, message = case
    before = snapshot(tables)
    assert_refused(lambda: append(tables, **changed), error, argument, message)
    assert snapshot(tables) == before


def foreign(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


class Call:
    """Arguments of one call that would succeed, on the manager's device, with some replaced.

    A replacement that is callable is made from the manager.
    """

    def __init__(self, tables: AscendBlockTables, method: str, changed: dict[str, Any]) -> None:
        idx_mapping, query_start_loc, positions = batch_tensors(tables, [(0, [0, 1]), (1, [2])])
        batch = {
            "idx_mapping": idx_mapping,
            "query_start_loc": query_start_loc,
            "positions": positions,
        }
        arguments: dict[str, dict[str, Any]] = {
            "gather_block_tables": {"idx_mapping": idx_mapping, "num_reqs_padded": 3},
            "compute_slot_mappings": {**batch, "num_tokens_padded": 4},
            "step": {**batch, "num_reqs_padded": 3, "num_tokens_padded": 4},
            "map_tokens": {"rows": idx_mapping, "positions": positions[:2]},
            "get_dummy_block_tables": {"num_reqs": 1},
            "get_dummy_slot_mappings": {"num_tokens": 1},
            "launch_plan": {"num_reqs": 1, "num_tokens": 1},
            "explain": {"group": 0, "req_index": 0, "position": 0},
        }
        self.method = getattr(tables, method)
        self.arguments = arguments[method]
        for name, value in changed.items():
            self.arguments[name] = value(tables) if callable(value) else value

    def __call__(self) -> object:
        return self.method(**self.arguments)


def out_slots(
    *shape: int, dtype: torch.dtype = torch.int64
) -> Callable[[AscendBlockTables], torch.Tensor]:
    return lambda tables: torch.zeros(shape, dtype=dtype, device=tables.device)


def out_tables(
    *shapes: tuple[int, int], dtype: torch.dtype = torch.int32
) -> Callable[[AscendBlockTables], list[torch.Tensor]]:
    return lambda tables: [
        torch.zeros(shape, dtype=dtype, device=tables.device) for shape in shapes
    ]


def vector(values: list[int], dtype: torch.dtype) -> Callable[[AscendBlockTables], torch.Tensor]:
    return lambda tables: torch.tensor(values, dtype=dtype, device=tables.device)


def sparse(dtype: torch.dtype) -> Callable[[AscendBlockTables], torch.Tensor]:
    def build(tables: AscendBlockTables) -> torch.Tensor:
        values = torch.tensor([1], dtype=dtype, device=tables.device)
        return torch.sparse_coo_tensor([[0]], values, (4,), check_invariants=True)

    return build


I32, I64 = torch.int32, torch.int64
BAD_BATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "idx_mapping a list": ({"idx_mapping": [0, 1]}, "idx_mapping", "a torch.Tensor; got list"),
    "idx_mapping an array": (
        {"idx_mapping": np.zeros(2, dtype=np.int32)},
        "idx_mapping",
        "got ndarray",
    ),
    "idx_mapping None": ({"idx_mapping": None}, "idx_mapping", "got NoneType"),
    "idx_mapping float": (
        {"idx_mapping": vector([0, 1], torch.float32)},
        "idx_mapping",
        "torch.int32 or torch.int64; got torch.float32",
    ),
    "idx_mapping bool": ({"idx_mapping": vector([0, 1], torch.bool)}, "idx_mapping", "bool"),
    "idx_mapping int16": ({"idx_mapping": vector([0, 1], torch.int16)}, "idx_mapping", "int16"),
    "idx_mapping 0-d": ({"idx_mapping": out_slots()}, "idx_mapping", r"shape \[\]"),
    "idx_mapping 2-d": ({"idx_mapping": out_slots(1, 2)}, "idx_mapping", r"shape \[1, 2\]"),
    "idx_mapping strided": (
        {"idx_mapping": lambda tables: int32(tables, [0, 9, 1, 9])[::2]},
        "idx_mapping",
        r"contiguous tensor; got stride \(2,\)",
    ),
    "idx_mapping sparse": ({"idx_mapping": sparse(I32)}, "idx_mapping", "sparse_coo"),
    "idx_mapping elsewhere": (
        {"idx_mapping": foreign(2, dtype=I32)},
        "idx_mapping",
        "got one on meta",
    ),
}
BAD_TOKENS: dict[str, tuple[dict[str, Any], str, str]] = {
    "query_start_loc int64": (
        {"query_start_loc": vector([0, 2, 3], I64)},
        "query_start_loc",
        "torch.int32; got torch.int64",
    ),
    "query_start_loc too short": (
        {"query_start_loc": vector([0, 3], I32)},
        "query_start_loc",
        r"shape \[>= 3\]; got shape \[2\]",
    ),
    "query_start_loc empty": ({"query_start_loc": vector([], I32)}, "query_start_loc", "shape"),
    "query_start_loc strided": (
        {"query_start_loc": lambda tables: int32(tables, [0, 9, 2, 9, 3, 9])[::2]},
        "query_start_loc",
        "contiguous",
    ),
    "query_start_loc elsewhere": (
        {"query_start_loc": foreign(3, dtype=I32)},
        "query_start_loc",
        "meta",
    ),
    "positions int32": (
        {"positions": vector([0, 1, 2], I32)},
        "positions",
        "torch.int64; got torch.int32",
    ),
    "positions float": ({"positions": vector([0, 1, 2], torch.float64)}, "positions", "float64"),
    "positions 2-d": ({"positions": out_slots(1, 3)}, "positions", r"shape \[1, 3\]"),
    "positions strided": (
        {"positions": lambda tables: int64(tables, [0, 9, 1, 9, 2, 9])[::2]},
        "positions",
        "contiguous",
    ),
    "positions sparse": ({"positions": sparse(I64)}, "positions", "sparse_coo"),
    "positions elsewhere": ({"positions": foreign(3, dtype=I64)}, "positions", "meta"),
    "positions None": ({"positions": None}, "positions", "NoneType"),
    "num_tokens_padded negative": (
        {"num_tokens_padded": -1},
        "num_tokens_padded",
        r"\[0, 16\]; got -1",
    ),
    "num_tokens_padded over capacity": ({"num_tokens_padded": 17}, "num_tokens_padded", "got 17"),
    "num_tokens_padded float": (
        {"num_tokens_padded": 4.0},
        "num_tokens_padded",
        r"an int; got 4\.0",
    ),
    "num_tokens_padded bool": ({"num_tokens_padded": True}, "num_tokens_padded", "got True"),
    "replay_start by row, too short": (
        {"replay_start": vector([0], I32)},
        "replay_start",
        r"shape \[>= 2\]; got shape \[1\]",
    ),
    "replay_start int64": ({"replay_start": vector([0, 0], I64)}, "replay_start", "int64"),
    "replay_start a list": ({"replay_start": [0, 0]}, "replay_start", "got list"),
    "replay_start elsewhere": (
        {"replay_start": foreign(2, dtype=I32)},
        "replay_start",
        "meta",
    ),
}
BAD_PADDED_REQS: dict[str, tuple[dict[str, Any], str, str]] = {
    "num_reqs_padded below the batch": (
        {"num_reqs_padded": 1},
        "num_reqs_padded",
        r"a number in \[2, 4\]; got 1\. The maximum is max_num_reqs",
    ),
    "num_reqs_padded above the rows": ({"num_reqs_padded": 5}, "num_reqs_padded", "got 5"),
    "num_reqs_padded negative": ({"num_reqs_padded": -2}, "num_reqs_padded", "got -2"),
    "num_reqs_padded float": ({"num_reqs_padded": 3.0}, "num_reqs_padded", r"got 3\.0"),
    "more batch entries than rows": (
        {"idx_mapping": vector([0, 1, 2, 3, 0], I32), "num_reqs_padded": 5},
        "idx_mapping",
        "at most 4 entries; got 5. The maximum is max_num_reqs",
    ),
    "num_computed_tokens by batch": (
        {"num_computed_tokens": vector([9, 9], I32)},
        "num_computed_tokens",
        r"shape \[>= 4\]; got shape \[2\]",
    ),
    "num_computed_tokens int64": (
        {"num_computed_tokens": vector([9] * 4, I64)},
        "num_computed_tokens",
        "int64",
    ),
    "num_computed_tokens a list": (
        {"num_computed_tokens": [9] * 4},
        "num_computed_tokens",
        "list",
    ),
    "num_computed_tokens elsewhere": (
        {"num_computed_tokens": foreign(4, dtype=I32)},
        "num_computed_tokens",
        "meta",
    ),
}
BAD_TABLES_OUT: dict[str, tuple[dict[str, Any], str, str]] = {
    "out of one table": ({"out": out_tables((4, 8))}, "out", "expected 2 tables.*; got 1"),
    "out a tensor": ({"out": out_slots(2, 8, dtype=I32)}, "out", "2 tables.*; got Tensor"),
    "out a number": ({"out": 3}, "out", "2 tables.*; got int"),
    "out of None": ({"out": [None, None]}, "out[0]", "got NoneType"),
    "out int64": ({"out": out_tables((4, 8), (4, 8), dtype=I64)}, "out[0]", "torch.int32; got"),
    "out too narrow": (
        {"out": out_tables((4, 8), (4, 7))},
        "out[1]",
        r"shape \[>= 0, >= 8\]; got shape \[4, 7\]",
    ),
    "out of too few rows": (
        {"out": out_tables((4, 8), (2, 8))},
        "num_reqs_padded",
        r"\[2, 2\]; got 3.*rows of out",
    ),
    "out of fewer rows than the batch": (
        {"out": out_tables((4, 8), (1, 8))},
        "idx_mapping",
        "at most 1 entries; got 2.*rows of out",
    ),
    "out elsewhere": (
        {"out": [foreign(4, 8, dtype=I32), foreign(4, 8, dtype=I32)]},
        "out[0]",
        "meta",
    ),
    "out with strided columns": (
        {"out": lambda tables: [table[:, ::2] for table in out_tables((4, 16), (4, 16))(tables)]},
        "out[0]",
        r"contiguous rows.*stride \(16, 2\)",
    ),
    "out with all rows in one place": (
        {"out": lambda tables: [t.expand(4, 8) for t in out_tables((1, 8), (1, 8))(tables)]},
        "out[0]",
        r"do not overlap.*stride \(0, 1\)",
    ),
    "out of one table twice": (
        {"out": lambda tables: out_tables((4, 8))(tables) * 2},
        "out[1]",
        r"a table of its own; got the memory of out\[0\]",
    ),
    "out of the source tables": (
        {"out": lambda tables: [table.gpu for table in tables.block_tables]},
        "out[0]",
        "memory outside the manager, or input_block_tables whole",
    ),
    "out of one of the gathered tables": (
        {"out": lambda tables: [tables.input_block_tables[0], *out_tables((4, 8))(tables)]},
        "out[0]",
        "input_block_tables whole",
    ),
    "out of shifted gathered tables": (
        {"out": lambda tables: [table[1:] for table in tables.input_block_tables]},
        "out[0]",
        "input_block_tables whole",
    ),
    "out_ptrs without out": ({"out_ptrs": vector([1, 2], I64)}, "out", "out_ptrs"),
}
BAD_SLOTS_OUT: dict[str, tuple[dict[str, Any], str, str]] = {
    "out of too few groups": ({"out": out_slots(1, 16)}, "out", r"shape \[>= 2"),
    "out of too many groups": ({"out": out_slots(3, 16)}, "out", "2 rows, one per KV.*got 3"),
    "out float": ({"out": out_slots(2, 16, dtype=torch.float32)}, "out", "float32"),
    "out int16": ({"out": out_slots(2, 16, dtype=torch.int16)}, "out", "int16"),
    "out 1-d": ({"out": out_slots(32)}, "out", r"shape \[32\]"),
    "out a list": ({"out": [[0] * 16] * 2}, "out", "a torch.Tensor; got list"),
    "out elsewhere": ({"out": foreign(2, 16, dtype=I64)}, "out", "meta"),
    "out with strided columns": (
        {"out": lambda tables: out_slots(2, 32)(tables)[:, ::2]},
        "out",
        r"stride \(32, 2\)",
    ),
    "out transposed": ({"out": lambda tables: out_slots(16, 2)(tables).t()}, "out", "contiguous"),
    "out with all groups in one row": (
        {"out": lambda tables: out_slots(1, 16)(tables).expand(2, 16)},
        "out",
        "do not overlap",
    ),
    "out with overlapping rows": (
        {"out": lambda tables: out_slots(24)(tables).as_strided((2, 16), (8, 1))},
        "out",
        r"stride\(0\) >= 16.*stride \(8, 1\)",
    ),
    "out sparse": (
        {"out": lambda tables: out_slots(2, 16)(tables).to_sparse()},
        "out",
        "sparse_coo",
    ),
}
BAD_DRAFTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer positions than rows": ({"positions": vector([1], I64)}, "positions", "2 entries"),
    "more positions than rows": ({"positions": vector([1] * 3, I64)}, "positions", "got 3"),
    "rows a list": ({"rows": [0, 1]}, "rows", "got list"),
    "rows float": ({"rows": vector([0, 1], torch.float32)}, "rows", "float32"),
    "rows 2-d": ({"rows": out_slots(1, 2)}, "rows", "shape"),
    "rows elsewhere": ({"rows": foreign(2, dtype=I32)}, "rows", "meta"),
    "positions int32": ({"positions": vector([1, 2], I32)}, "positions", "torch.int64"),
    "more tokens than the buffer": (
        {"rows": vector([0] * 17, I32), "positions": vector([0] * 17, I64)},
        "tokens in rows",
        r"\[0, 16\]; got 17.*max_num_batched_tokens",
    ),
    "out narrower than the tokens": ({"out": out_slots(2, 1)}, "tokens in rows", "got 2"),
    "out of too few groups": ({"out": out_slots(1, 16)}, "out", "shape"),
}
BAD_NUMBERS: dict[str, dict[str, tuple[dict[str, Any], str, str]]] = {
    "get_dummy_block_tables": {
        "more rows than the table": ({"num_reqs": 5}, "num_reqs", "got 5.*max_num_reqs"),
        "negative rows": ({"num_reqs": -1}, "num_reqs", "got -1"),
        "rows None": ({"num_reqs": None}, "num_reqs", "an int; got None"),
    },
    "get_dummy_slot_mappings": {
        "more tokens than the capacity": ({"num_tokens": 17}, "num_tokens", "got 17.*batched"),
        "tokens bool": ({"num_tokens": False}, "num_tokens", "got False"),
    },
    "launch_plan": {
        "more requests than rows": ({"num_reqs": 5}, "num_reqs", "got 5"),
        "negative tokens": ({"num_tokens": -1}, "num_tokens", "got -1"),
        "max_query_len a str": ({"max_query_len": "long"}, "max_query_len", "got 'long'"),
        "max_query_len negative": ({"max_query_len": -1}, "max_query_len", "got -1"),
        "max_query_len over the capacity": ({"max_query_len": 17}, "max_query_len", "got 17"),
    },
    "explain": {
        "no such group": ({"group": 2}, "group", r"\[0, 1\]; got 2"),
        "group negative": ({"group": -1}, "group", "got -1"),
        "row below the dummy": ({"req_index": -2}, "req_index", "got -2"),
        "position float": ({"position": 1.5}, "position", r"an int; got 1\.5"),
        "position None": ({"position": None}, "position", "got None"),
        "position beyond int64": ({"position": 2**63}, "position", "got 922"),
        "replay_start a list": ({"replay_start": [0]}, "replay_start", r"got \[0\]"),
    },
}


def bad_calls() -> Iterator[Any]:
    slots_of_batch = {**BAD_BATCHES, **BAD_TOKENS}
    cases = {
        "gather_block_tables": {**BAD_BATCHES, **BAD_PADDED_REQS, **BAD_TABLES_OUT},
        "compute_slot_mappings": {**slots_of_batch, **BAD_SLOTS_OUT},
        "step": {**slots_of_batch, **BAD_PADDED_REQS},
        "map_tokens": {**BAD_DRAFTS},
        **BAD_NUMBERS,
    }
    for method, named in cases.items():
        for name, (changed, argument, message) in named.items():
            if "more batch entries" in name and method == "step":
                changed = {**changed, "query_start_loc": vector([0, 1, 1, 1, 1, 1], I32)}
            yield pytest.param(method, changed, argument, message, id=f"{method}: {name}")


@pytest.mark.parametrize(("method", "changed", "argument", "message"), list(bad_calls()))
def test_bad_call_is_refused_and_changes_nothing(
    tables: AscendBlockTables,
    method: str,
    changed: dict[str, Any],
    argument: str,
    message: str,
) -> None:
    before = snapshot(tables)
    call = Call(tables, method, changed)
    assert_refused(call, InvalidArgumentError, argument, message)
    assert snapshot(tables) == before


@pytest.mark.parametrize("method", ["gather_block_tables", "compute_slot_mappings", "step"])
def test_the_unchanged_call_succeeds(tables: AscendBlockTables, method: str) -> None:
    """Otherwise the refusals above could come from anything."""
    Call(tables, method, {})()
    assert tables.launches > 0


HOST_VISIBLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "query_start_loc not from zero": (
        {"query_start_loc": vector([1, 2, 3], I32)},
        "query_start_loc",
        "0 in its first entry; got 1",
    ),
    "query_start_loc decreasing": (
        {"query_start_loc": vector([0, 3, 2], I32)},
        "query_start_loc",
        "non-decreasing offsets; got 3 then 2 at batch entry 1",
    ),
    "query_start_loc negative": (
        {"query_start_loc": vector([0, INT32_MIN, 2], I32)},
        "query_start_loc",
        "got 0 then -2147483648 at batch entry 0",
    ),
    "positions too short": (
        {"positions": vector([0, 1], I64)},
        "positions",
        r"at least 3 entries \(query_start_loc\[2\]\); got 2",
    ),
    "tokens over capacity": (
        {"query_start_loc": vector([0, 2, 17], I32), "positions": vector([0] * 17, I64)},
        "query_start_loc",
        "at most 16 tokens; got 17.*max_num_batched_tokens",
    ),
}


@pytest.mark.parametrize("case", HOST_VISIBLE.values(), ids=HOST_VISIBLE.keys())
@pytest.mark.parametrize("method", ["compute_slot_mappings", "step"])
def test_contents_are_checked_where_the_host_sees_them(
    method: str, case: tuple[dict[str, Any], str, str]
) -> None:
    tables = MakeTables("cpu")(GROUPS, {0: [[5, 6], [3]], 1: [[7], [4, 2]]})
    tables.append_block_ids(2, [[9], [9]], overwrite=True)
    changed, argument, message = case
    before = snapshot(tables)
    assert_refused(Call(tables, method, changed), InvalidArgumentError, argument, message)
    assert snapshot(tables) == before


def test_tokens_over_the_capacity_of_a_narrow_out() -> None:
    tables = MakeTables("cpu")(GROUPS, {0: [[5], [3]], 1: [[7], [4]]})
    out = torch.full((2, 2), 7)
    call = Call(tables, "compute_slot_mappings", {"out": out, "num_tokens_padded": 2})
    assert_refused(call, InvalidArgumentError, "query_start_loc", "at most 2 tokens; got 3")
    assert out.tolist() == [[7, 7], [7, 7]]


def test_int32_out_that_cannot_hold_a_slot_is_refused(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, {0: [[2**27 - 1], [1]]})
    out = torch.zeros(2, 16, dtype=torch.int32, device=tables.device)
    call = Call(tables, "compute_slot_mappings", {"out": out})
    call()
    assert out[0, 0] == 2**31 - 16
    tables.append_block_ids(0, [[2**27], [1]], overwrite=False)
    message = r"int64: group 0 \(full\) holds block 134217728, whose last slot is 2147483663"
    assert_refused(call, InvalidArgumentError, "out", message)
    drafts = Call(tables, "map_tokens", {"out": out})
    assert_refused(drafts, InvalidArgumentError, "out", message)


def build(**changed: Any) -> AscendBlockTables:
    settings = {"max_num_reqs": 4, "max_num_batched_tokens": 16, **changed}
    return AscendBlockTables.from_groups(settings.pop("groups", GROUPS), **settings)


def build_from_lists(**changed: Any) -> AscendBlockTables:
    settings = {
        "block_sizes": [16, 64],
        "max_num_reqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_blocks_per_group": [8, 4],
        "device": "cpu",
        **changed,
    }
    return AscendBlockTables(**settings)


def group(**changed: Any) -> KVCacheGroup:
    return KVCacheGroup(**{"block_size": 16, "max_num_blocks": 8, **changed})


RING = KVCacheGroup(block_size=4, max_num_blocks=1, circular=True)
BAD_CONSTRUCTIONS: dict[str, tuple[Callable[[], object], str, str]] = {
    "block_size zero": (lambda: group(block_size=0), "block_size", r"\[1, .*got 0"),
    "block_size negative": (lambda: group(block_size=-16), "block_size", "got -16"),
    "block_size float": (lambda: group(block_size=16.0), "block_size", r"an int; got 16\.0"),
    "block_size bool": (lambda: group(block_size=True), "block_size", "got True"),
    "block_size None": (lambda: group(block_size=None), "block_size", "got None"),
    "block_size beyond int32": (lambda: group(block_size=2**31), "block_size", "2147483647"),
    "max_num_blocks zero": (lambda: group(max_num_blocks=0), "max_num_blocks", "got 0"),
    "max_num_blocks str": (lambda: group(max_num_blocks="8"), "max_num_blocks", "got '8'"),
    "kernel block zero": (lambda: group(kernel_block_size=0), "kernel_block_size", "got 0"),
    "kernel block that does not divide": (
        lambda: group(kernel_block_size=12),
        "kernel_block_size",
        r"a divisor of block_size \(16\); got 12",
    ),
    "kernel block larger than the block": (
        lambda: group(kernel_block_size=32),
        "kernel_block_size",
        "got 32",
    ),
    "circular split": (
        lambda: group(kernel_block_size=8, circular=True),
        "kernel_block_size",
        "in a circular group.*got 8",
    ),
    "circular a str": (lambda: group(circular="no"), "circular", "True or False; got 'no'"),
    "dcp_sharded 1": (lambda: group(dcp_sharded=1), "dcp_sharded", "got 1"),
    "prefix_cacheable int": (lambda: group(prefix_cacheable=1), "prefix_cacheable", "got 1"),
    "mode a str": (lambda: group(slot_mapping_mode="none"), "slot_mapping_mode", "got 'none'"),
    "mode None": (lambda: group(slot_mapping_mode=None), "slot_mapping_mode", "got None"),
    "window negative": (lambda: group(sliding_window_reach=-1), "sliding_window_reach", "-1"),
    "name None": (lambda: group(name=None), "name", "a str; got None"),
    "ranks zero": (lambda: ContextParallel(0), "context_parallel.size", "got 0"),
    "rank of the size": (
        lambda: ContextParallel(2, 2),
        "context_parallel.rank",
        r"rank < size \(2\); got 2",
    ),
    "rank negative": (lambda: ContextParallel(2, -1), "context_parallel.rank", "got -1"),
    "rank float": (lambda: ContextParallel(2, 1.0), "context_parallel.rank", r"got 1\.0"),
    "interleave zero": (
        lambda: ContextParallel(2, 0, 0),
        "context_parallel.interleave",
        "got 0",
    ),
    "interleave that does not divide": (
        lambda: build(context_parallel=ContextParallel(2, 0, 24)),
        "context_parallel.interleave of group 0 (full)",
        r"block_size \(16\).*got 24.*dcp_sharded=False",
    ),
    "ring dealt to ranks": (
        lambda: build(
            groups=[replace(RING, dcp_sharded=True)], context_parallel=ContextParallel(2)
        ),
        "dcp_sharded of group 0",
        "expected False or None.*2 ranks.*got True",
    ),
    "ring of three blocks": (
        lambda: group(kernel_block_size=None, max_num_blocks=3, circular=True),
        "max_num_blocks",
        "expected 1 in a circular group.*got 3",
    ),
    "ring in the prefix cache": (
        lambda: group(
            kernel_block_size=None, max_num_blocks=1, circular=True, prefix_cacheable=True
        ),
        "prefix_cacheable",
        "expected False or None in a circular group.*got True",
    ),
    "null block a bool": (lambda: build(null_block_id=True), "null_block_id", "got True"),
    "null block negative": (lambda: build(null_block_id=-1), "null_block_id", "got -1"),
    "null block whose columns are no int32": (
        lambda: build(null_block_id=2**31 - 1, num_blocks=None),
        "null_block_id in group 1",
        "its columns must fit the int32",
    ),
    "context_parallel a number": (
        lambda: build(context_parallel=2),
        "context_parallel",
        "fused_slots.ContextParallel; got 2",
    ),
    "context_parallel None": (lambda: build(context_parallel=None), "context_parallel", "None"),
    "groups None": (lambda: build(groups=None), "groups", "a list; got None"),
    "groups one group": (lambda: build(groups=GROUPS[0]), "groups", "a list"),
    "groups of dicts": (
        lambda: build(groups=[{"block_size": 16}]),
        "groups[0]",
        "a fused_slots.KVCacheGroup; got",
    ),
    "rows zero": (lambda: build(max_num_reqs=0), "max_num_reqs", "got 0"),
    "rows negative": (lambda: build(max_num_reqs=-4), "max_num_reqs", "got -4"),
    "rows float": (lambda: build(max_num_reqs=4.0), "max_num_reqs", r"got 4\.0"),
    "tokens zero": (lambda: build(max_num_batched_tokens=0), "max_num_batched_tokens", "got 0"),
    "tokens None": (
        lambda: build(max_num_batched_tokens=None),
        "max_num_batched_tokens",
        "got None",
    ),
    "replay_window negative": (lambda: build(replay_window=-1), "replay_window", "got -1"),
    "slot_dtype int16": (
        lambda: build(slot_dtype=torch.int16),
        "slot_dtype",
        "torch.int32 or torch.int64; got torch.int16",
    ),
    "slot_dtype a str": (lambda: build(slot_dtype="int32"), "slot_dtype", "got int32"),
    "slot_dtype zero": (lambda: build(slot_dtype=0), "slot_dtype", "got 0"),
    "pool zero": (lambda: build(num_blocks=0), "num_blocks of group 0 (full)", "got 0"),
    "pool float": (lambda: build(num_blocks=[1.5, 2]), "num_blocks of group 0", r"got 1\.5"),
    "pool of one group": (lambda: build(num_blocks=[9]), "num_blocks", "2 entries.*got 1"),
    "pool a str": (lambda: build(num_blocks="many"), "num_blocks", "a list; got 'many'"),
    "pool whose slots leave int32": (
        lambda: build(slot_dtype=torch.int32, num_blocks=[10, 2**25 + 1]),
        "num_blocks of group 1",
        "at most 33554432 blocks of 64 tokens.*slot_dtype=torch.int64",
    ),
    "pool whose columns leave int32": (
        lambda: build(num_blocks=[10, 2**30 + 1]),
        "num_blocks of group 1",
        "at most 1073741824 blocks.*columns must fit the int32 block table",
    ),
    "rows wider than int32": (
        lambda: build(groups=[group(max_num_blocks=2**31 - 1)]),
        "row width of group 0",
        "got 2147483648",
    ),
    "checked a str": (lambda: build(checked="yes"), "checked", "True or False; got 'yes'"),
    "device None": (lambda: build(device=None), "device", r"cuda\[:i\].*got None"),
    "device unknown": (lambda: build(device="tpu"), "device", "got 'tpu'"),
    "device of a bad index": (lambda: build(device="cpu:x"), "device", "got 'cpu:x'"),
    "device a float": (lambda: build(device=0.5), "device", r"got 0\.5"),
    "block_sizes a number": (lambda: build_from_lists(block_sizes=16), "block_sizes", "a list"),
    "block_sizes with a zero": (
        lambda: build_from_lists(block_sizes=[16, 0]),
        "block_size",
        "got 0",
    ),
    "max_num_blocks_per_group too short": (
        lambda: build_from_lists(max_num_blocks_per_group=[8]),
        "max_num_blocks_per_group",
        "2 entries, one per KV cache group; got 1",
    ),
    "max_num_blocks_per_group None": (
        lambda: build_from_lists(max_num_blocks_per_group=None),
        "max_num_blocks_per_group",
        "a list; got None",
    ),
    "slot_mapping_enabled too long": (
        lambda: build_from_lists(slot_mapping_enabled=[True] * 3),
        "slot_mapping_enabled",
        "got 3",
    ),
    "slot_mapping_enabled of strings": (
        lambda: build_from_lists(slot_mapping_enabled=["yes", "no"]),
        "slot_mapping_enabled",
        "got 'yes'",
    ),
    "dcp_sharded one bool": (
        lambda: build_from_lists(dcp_sharded=True),
        "dcp_sharded",
        "a list; got True",
    ),
    "sliding_window_reach too short": (
        lambda: build_from_lists(sliding_window_reach=[]),
        "sliding_window_reach",
        "got 0",
    ),
    "kernel_block_sizes too short": (
        lambda: build_from_lists(kernel_block_sizes=[16]),
        "kernel_block_sizes",
        "got 1",
    ),
    "kernel_block_sizes that do not divide": (
        lambda: build_from_lists(kernel_block_sizes=[16, 48]),
        "kernel_block_size",
        r"\(64\); got 48",
    ),
    "slot_mapping_modes of strings": (
        lambda: build_from_lists(slot_mapping_modes=["none", "none"]),
        "slot_mapping_mode",
        "got 'none'",
    ),
    "circular too short": (lambda: build_from_lists(circular=[True]), "circular", "got 1"),
    "prefix_cacheable a str": (
        lambda: build_from_lists(prefix_cacheable="ab"),
        "prefix_cacheable",
        "a list; got 'ab'",
    ),
    "cp_rank of the size": (
        lambda: build_from_lists(cp_size=2, cp_rank=2),
        "context_parallel.rank",
        "got 2",
    ),
    "num_blocks too long": (lambda: build_from_lists(num_blocks=[1, 2, 3]), "num_blocks", "3"),
}


@pytest.mark.parametrize("case", BAD_CONSTRUCTIONS.values(), ids=BAD_CONSTRUCTIONS.keys())
def test_bad_construction_is_refused(case: tuple[Callable[[], object], str, str]) -> None:
    call, argument, message = case
    assert_refused(call, ConfigurationError, argument, message)


@pytest.mark.parametrize("device", ["meta", "xpu", torch.device("meta")])
def test_device_that_no_backend_serves_is_refused(device: str | torch.device) -> None:
    assert_refused(lambda: build(device=device), BackendUnavailableError, "device", f"got {device}")


# What the contract allows.


def test_longer_arrays_are_read_only_as_far_as_the_batch_goes(tables: AscendBlockTables) -> None:
    expected = [[80, 81, 114] + [-1] * 13, [96 * 2, 96 * 2 + 1, 128 * 2 + 2] + [-1] * 13]
    idx_mapping = int32(tables, [0, 1])
    # Beyond the batch: offsets that decrease, positions that no row holds.
    query_start_loc = int32(tables, [0, 2, 3, 1, -5, 2**31 - 1])
    positions = int64(tables, [0, 1, 2, 2**62, -(2**63)])
    replay_start = int32(tables, [0, 0, 1, 1])
    tables.compute_slot_mappings(
        idx_mapping, query_start_loc, positions, 3, replay_start=replay_start
    )
    assert tables.slot_mappings.tolist() == expected
    assert tables.take_faults() == []


def test_positions_may_be_longer_than_the_capacity(tables: AscendBlockTables) -> None:
    positions = int64(tables, [3] * 1000)
    got = tables.compute_slot_mappings(int32(tables, [0]), int32(tables, [0, 2]), positions, 2)
    assert got.tolist()[0] == [83, 83]


def test_a_row_may_stand_in_a_batch_more_than_once(tables: AscendBlockTables) -> None:
    assert slots(tables, [(0, [0]), (1, [0]), (0, [1])])[0] == [80, 112, 81]
    assert [row[0] for row in gathered(tables, [0, 1, 0])[0]] == [5, 7, 5]


def test_more_batch_entries_than_rows_may_map_tokens(tables: AscendBlockTables) -> None:
    batch = [(row % 2, [row]) for row in range(7)]
    assert slots(tables, batch)[0] == [80, 113, 82, 115, 84, 117, 86]


def test_more_batch_entries_than_rows_may_be_gathered_into_out(
    tables: AscendBlockTables,
) -> None:
    out = [torch.full((9, 8), 77, dtype=torch.int32, device=tables.device) for _ in range(2)]
    before = [table.tolist() for table in tables.input_block_tables]
    got = tables.gather_block_tables(int64(tables, [0, 1] * 3), 7, out=out)
    assert [table.shape for table in got] == [(7, 8), (7, 8)]
    assert [row[0] for row in out[0].tolist()] == [5, 7, 5, 7, 5, 7, 0, 77, 77]
    assert out[1][6].tolist() == [0] * 8
    assert out[1][7].tolist() == [77] * 8
    assert [table.tolist() for table in tables.input_block_tables] == before


def test_out_tables_may_be_wider_and_padded(tables: AscendBlockTables) -> None:
    wide = torch.full((4, 40), 77, dtype=torch.int32, device=tables.device)
    out = [wide[:, :20], torch.full((5, 8), 77, dtype=torch.int32, device=tables.device)]
    tables.gather_block_tables(int32(tables, [1, -1]), 3, out=out)
    assert wide[:, 20:].eq(77).all()
    assert wide[:3, :20].tolist() == [[7] + [0] * 19, [0] * 20, [0] * 20]
    assert wide[3].eq(77).all()
    assert out[1].tolist()[0] == [8, 9, 4, 5, 0, 0, 0, 0]


def test_gathering_into_the_managers_own_tables_leaves_nothing_behind(
    tables: AscendBlockTables,
) -> None:
    """A caller may pass the persistent tables, or the views it got from them, as `out`."""
    own = tables.gather_block_tables(int32(tables, [0, 1, 0, 1]), 4, out=tables.input_block_tables)
    assert [row[0] for row in own[0].tolist()] == [5, 7, 5, 7]
    assert gathered(tables, [1])[0] == [[7] + [0] * 7]
    assert not any(table[1:].any() for table in tables.input_block_tables)
    views = tables.gather_block_tables(int32(tables, [0, 1, 1]), 3)
    tables.gather_block_tables(int32(tables, [0, 0]), 3, out=views)
    assert views[0].tolist() == [[5, 6] + [0] * 6] * 2 + [[0] * 8]
    assert gathered(tables, [1])[0] == [[7] + [0] * 7]
    assert not any(table[1:].any() for table in tables.input_block_tables)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [3, 16, 40])
def test_out_slots_of_another_dtype_and_width(
    tables: AscendBlockTables, dtype: torch.dtype, width: int
) -> None:
    before = tables.slot_mappings.clone()
    out = torch.full((2, width), 77, dtype=dtype, device=tables.device)
    got = Call(tables, "compute_slot_mappings", {"out": out, "num_tokens_padded": width})()
    assert isinstance(got, torch.Tensor)
    assert got.data_ptr() == out.data_ptr()
    assert out.tolist() == [
        [80, 81, 114] + [-1] * (width - 3),
        [192, 193, 258] + [-1] * (width - 3),
    ]
    assert torch.equal(tables.slot_mappings, before)


def test_out_slots_may_be_rows_of_something_wider(tables: AscendBlockTables) -> None:
    wide = torch.full((2, 40), 77, device=tables.device)
    Call(tables, "compute_slot_mappings", {"out": wide[:, 8:24]})()
    assert wide[:, :8].eq(77).all()
    assert wide[:, 24:].eq(77).all()
    assert wide[0, 8:12].tolist() == [80, 81, 114, -1]


def test_out_slots_of_one_column_in_any_layout(tables: AscendBlockTables) -> None:
    out = torch.zeros(1, 2, dtype=torch.int64, device=tables.device).t()
    assert out.stride() == (1, 2)
    arguments = {"query_start_loc": int32(tables, [0, 1, 1]), "out": out, "num_tokens_padded": 1}
    Call(tables, "compute_slot_mappings", arguments)()
    assert out.tolist() == [[80], [192]]


def test_drafts_go_to_a_buffer_of_their_own(tables: AscendBlockTables) -> None:
    before = tables.slot_mappings.clone()
    got = tables.map_tokens(int64(tables, [1, -1, 0]), int64(tables, [4, 4, 4]))
    assert got.tolist() == [[116, -1, 84], [260, -1, 196]]
    assert tables.map_tokens(int32(tables, [0]), int64(tables, [4])).tolist() == [[84], [196]]
    out = torch.full((2, 3), 77, dtype=torch.int32, device=tables.device)
    assert tables.map_tokens(int32(tables, [0]), int64(tables, [4]), out=out).shape == (2, 1)
    assert out.tolist() == [[84, -1, -1], [196, -1, -1]]
    assert torch.equal(tables.slot_mappings, before)


def test_idx_mapping_int64_and_int32_agree(tables: AscendBlockTables) -> None:
    _, query_start_loc, positions = batch_tensors(tables, [(0, [0, 1]), (-1, [0]), (1, [40])])
    results = []
    for dtype in (torch.int32, torch.int64):
        idx_mapping = torch.tensor([0, -1, 1], dtype=dtype, device=tables.device)
        block_tables, slot_mappings = tables.step(
            idx_mapping, query_start_loc, positions, num_reqs_padded=4
        )
        results.append(([t.tolist() for t in block_tables], slot_mappings.tolist()))
    assert results[0] == results[1]
    assert results[0][1][1][3] == 9 * 32 + 8


def test_a_manager_of_no_groups_does_nothing(make_tables: MakeTables) -> None:
    tables = make_tables([])
    tables.append_block_ids(0, [], overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [(0, [0, 1])]) == []
    assert gathered(tables, [0]) == []
    block_tables, slot_mappings = Call(tables, "step", {})()
    assert block_tables == ()
    assert slot_mappings.shape == (0, 4)
    assert tables.map_tokens(int32(tables, [0]), int64(tables, [0])).shape == (0, 1)
    assert tables.gather_block_tables(int32(tables, [0]), 1, out=[]) == ()
    assert tables.get_dummy_block_tables(2) == ()
    assert tables.take_faults() == []
    tables.check_integrity()


def test_a_batch_of_dummies_alone(tables: AscendBlockTables) -> None:
    block_tables, slot_mappings = tables.step(
        int32(tables, [-1, -1]), int32(tables, [0, 1, 3]), int64(tables, [0, 5, -1])
    )
    assert not any(table.any() for table in block_tables)
    assert set(slot_mappings.flatten().tolist()) == {-1}
    assert tables.take_faults() == []


@pytest.mark.parametrize("padded", [0, 2])
def test_a_view_narrower_than_the_batch_is_refused(tables: AscendBlockTables, padded: int) -> None:
    tables.slot_mappings.fill_(-5)
    for call in ("compute_slot_mappings", "step"):
        with pytest.raises(
            InvalidArgumentError, match=rf"num_tokens_padded: expected at least 3.*got {padded}"
        ):
            Call(tables, call, {"num_tokens_padded": padded})()
        assert set(tables.slot_mappings.flatten().tolist()) == {-5}
    got = Call(tables, "compute_slot_mappings", {"num_tokens_padded": 3})()
    assert got.tolist()[0] == [80, 81, 114]


def test_an_empty_batch_may_have_an_empty_view(tables: AscendBlockTables) -> None:
    empty = int32(tables, [])
    got = tables.compute_slot_mappings(empty, int32(tables, [0]), int64(tables, []), 0)
    assert got.shape == (2, 0)
    assert set(tables.slot_mappings.flatten().tolist()) == {-1}


@pytest.mark.parametrize(
    "ids",
    [
        [np.array([8, 9], dtype=np.int32), np.array([8], dtype=np.int64)],
        [np.array([8, 9], dtype=np.uint64), [np.int32(8)]],
        [[np.int64(8), 9], (8,)],
        [range(8, 10), array("q", [8])],
        (array("i", [8, 9]), range(8, 9)),
        np.array([[8, 9], [8, 9]])[:, :1].repeat(2, axis=1) + np.arange(2),
        [UserList([8, 9]), [8]],
        UserList([[8, 9], [8]]),
    ],
    ids=["int32", "uint64", "mixed", "range", "array", "2-d array", "user list", "list of lists"],
)
def test_ids_in_every_kind_of_list(make_tables: MakeTables, ids: Any) -> None:
    tables = make_tables(GROUPS)
    tables.append_block_ids(np.int64(1), ids, overwrite=np.bool_(True))
    tables.apply_staged_writes()
    got = gathered(tables, [1])
    assert got[0][0][:3] == [8, 9, 0]
    assert got[1][0][:2] == [16, 17]


@pytest.mark.parametrize("size", [np.int8, np.uint8, np.uint32, np.uint64])
def test_sizes_in_every_kind_of_int(make_tables: MakeTables, size: type[np.integer[Any]]) -> None:
    """Plans are kept by their sizes: one made in another's arithmetic would stay."""
    tables = make_tables(GROUPS)
    for of in (size, int):
        sizes = {"num_reqs_padded": of(3), "num_tokens_padded": of(4)}
        tables_of_rows, slots = Call(tables, "step", sizes)()
        assert ([len(table) for table in tables_of_rows], slots.shape) == ([3, 3], (2, 4))
        assert Call(tables, "compute_slot_mappings", {"num_tokens_padded": of(4)})().shape == (2, 4)
        assert [len(table) for table in tables.get_dummy_block_tables(of(3))] == [3, 3]
        assert tables.get_dummy_slot_mappings(of(4)).shape == (2, 4)
        assert tables.launch_plan(of(3), of(4), of(2)) == tables.launch_plan(3, 4, 2)


def test_sizes_may_be_numpy_integers_and_become_python_ints() -> None:
    numpy_group = KVCacheGroup(
        block_size=np.int32(2**16),
        max_num_blocks=np.int64(8),
        kernel_block_size=np.int16(2**14),
        sliding_window_reach=np.int64(5),
        circular=np.bool_(False),
    )
    assert type(numpy_group.block_size) is int
    assert type(numpy_group.kernel_block_size) is int
    assert numpy_group.circular is False
    assert numpy_group == KVCacheGroup(2**16, 8, 2**14, sliding_window_reach=5)
    tables = AscendBlockTables.from_groups(
        [numpy_group],
        max_num_reqs=np.int64(4),
        max_num_batched_tokens=torch.Size([16])[0],
        context_parallel=ContextParallel(np.int64(1), np.int8(0), np.int64(1)),
        replay_window=np.int32(0),
        num_blocks=np.int64(2**15),
        checked=np.bool_(True),
    )
    for value in (tables.max_num_reqs, tables.cp_size, tables.cp_rank, tables.cp_interleave):
        assert type(value) is int
    assert tables.layout.num_blocks == (2**15,)
    # The last slot, 2**31 - 1: int32 arithmetic of NumPy scalars would have wrapped.
    tables.append_block_ids(0, [[2**15 - 1]], overwrite=True)
    assert slots_after_apply(tables, [(0, [2**16 - 1])]) == [[2**31 - 1]]


def slots_after_apply(tables: AscendBlockTables, batch: Any) -> list[list[int]]:
    tables.apply_staged_writes()
    return slots(tables, batch)


def test_lists_of_the_vllm_constructor_may_be_arrays() -> None:
    tables = build_from_lists(
        block_sizes=np.array([16, 64]),
        max_num_blocks_per_group=np.array([8, 4]),
        slot_mapping_enabled=np.array([True, False]),
        device=torch.device("cpu"),
    )
    assert tables.block_sizes == [16, 64]
    assert all(type(size) is int for size in tables.block_sizes)
    assert [table.shape[1] for table in tables.input_block_tables] == [8, 4]
    tables.append_block_ids(0, [[5], [6]], overwrite=True)
    assert slots_after_apply(tables, [(0, [1])]) == [[81], [-1]]


def test_groups_may_come_from_a_generator() -> None:
    tables = build(groups=(g for g in GROUPS))
    assert tables.num_kv_cache_groups == 2
    assert [table.shape[1] for table in tables.input_block_tables] == [8, 8]


def test_disabled_group_is_padding_and_may_be_wide() -> None:
    tables = build_from_lists(slot_mapping_enabled=[True, False], circular=[False, True])
    tables.append_block_ids(0, [[5], [6, 7]], overwrite=True)
    assert slots_after_apply(tables, [(0, [1, 3])]) == [[81, 83], [-1, -1]]
    assert gathered(tables, [0])[1] == [[6, 7, 0, 0]]


def test_device_with_an_index_is_the_device_its_tensors_are_on() -> None:
    tables = build(device="cpu:0")
    assert tables.device == torch.zeros(1, device="cpu:0").device
    assert slots(tables, [(0, [0])]) == [[-1], [-1]]


@pytest.mark.parametrize("position", [2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1])
def test_very_large_positions_are_faults_and_not_slots(
    make_tables: MakeTables, position: int
) -> None:
    groups = [*GROUPS, KVCacheGroup(block_size=12, max_num_blocks=4)]
    tables = make_tables(groups, {0: [[5], [3], [2]]})
    assert slots(tables, [(0, [0, position])]) == [[80, -1], [192, -1], [24, -1]]
    assert [fault.count for fault in tables.take_faults()] == [1, 1, 1]


@pytest.mark.parametrize("position", [2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1])
def test_very_large_positions_wrap_exactly_in_a_ring(
    make_tables: MakeTables, position: int
) -> None:
    ring = KVCacheGroup(block_size=12, max_num_blocks=1, circular=True)
    tables = make_tables([RING, ring], {0: [[7], [7]]})
    assert slots(tables, [(0, [position])]) == [[28 + position % 4], [84 + position % 12]]


def test_negative_positions_are_padding_without_a_fault(tables: AscendBlockTables) -> None:
    assert slots(tables, [(0, [-1, -(2**63), 0])])[0] == [-1, -1, 80]
    assert tables.take_faults() == []


def test_appending_nothing_is_not_a_pending_write(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, {0: [[5], [6]]})
    launches = tables.launches
    tables.append_block_ids(0, [[], []], overwrite=False)
    tables.append_block_ids(1, ([], np.array([], dtype=np.int64)), overwrite=False)
    tables.apply_staged_writes()
    assert tables.launches == launches
    assert gathered(tables, [0])[0][0][:2] == [5, 0]


def test_redirected_writes_go_to_the_null_block(make_tables: MakeTables) -> None:
    tables = make_tables(GROUPS, {0: [[5, 6], [3]]})
    tables.redirect_writes_to_null_block = True
    with pytest.raises(BlockIdError):
        append(tables, new_block_ids=[[-1], [1]])
    tables.append_block_ids(0, [[7], [8, 9]], overwrite=False)
    tables.append_block_ids(1, [[7], [2**30 - 1]], overwrite=True)
    tables.apply_staged_writes()
    assert gathered(tables, [0, 1]) == [
        [[5, 6, 0] + [0] * 5, [0] * 8],
        [[6, 7, 0, 1, 0, 1, 0, 0], [0, 1] + [0] * 6],
    ]
    assert tables.num_blocks.np[:, :2].tolist() == [[3, 1], [6, 2]]
    assert slots(tables, [(1, [3, 40])]) == [[3, -1], [3, 40]]
    tables.redirect_writes_to_null_block = False
    tables.append_block_ids(1, [[7], [9]], overwrite=True)
    assert slots_after_apply(tables, [(1, [3])]) == [[115], [64 * 9 + 3]]
    # Redirected ids never reached a table, so they do not count against an int32 output.
    out = torch.zeros(2, 16, dtype=torch.int32, device=tables.device)
    Call(tables, "compute_slot_mappings", {"out": out})()


def test_step_needs_no_padded_sizes(tables: AscendBlockTables) -> None:
    block_tables, slot_mappings = tables.step(
        *batch_tensors(tables, [(0, [0, 1]), (1, [2]), (2, [3])])
    )
    assert [table.shape[0] for table in block_tables] == [3, 3]
    assert slot_mappings.shape == (2, 16)
    assert slot_mappings[0, :4].tolist() == [80, 81, 114, 147]
    assert not tables._rows.pending


def test_errors_are_value_errors_with_their_parts() -> None:
    with pytest.raises(ValueError, match=re.escape("block_size: expected an int")) as raised:
        group(block_size="16")
    assert isinstance(raised.value, BlockTableError)
    assert (raised.value.argument, raised.value.actual) == ("block_size", "'16'")


def test_state_group_modes_by_list() -> None:
    tables = build_from_lists(
        slot_mapping_modes=[SlotMappingMode.TOKEN_TO_KV_SLOT, SlotMappingMode.NONE]
    )
    tables.append_block_ids(0, [[5], [6]], overwrite=True)
    assert slots_after_apply(tables, [(0, [1])]) == [[81], [-1]]


@pytest.mark.parametrize(
    "memory",
    [
        lambda tables: tables.num_blocks.gpu,
        lambda tables: tables.input_block_tables[0][:2],
        lambda tables: tables.block_tables[1].gpu[:2, 4:],
    ],
    ids=["row lengths", "gathered", "source"],
)
def test_slots_are_not_written_into_the_tables(tables: AscendBlockTables, memory: Any) -> None:
    before = [tables.num_blocks.gpu.clone(), *(table.clone() for table in tables._backend.tables)]
    for call in (
        lambda: Call(tables, "compute_slot_mappings", {"out": memory(tables)})(),
        lambda: tables.map_tokens(int32(tables, [0]), int64(tables, [3]), out=memory(tables)),
    ):
        with pytest.raises(InvalidArgumentError, match="out: expected memory outside the manager"):
            call()
    after = [tables.num_blocks.gpu, *tables._backend.tables]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_tables_to_gather_into_share_no_element(tables: AscendBlockTables) -> None:
    rows = int32(tables, [0])
    whole = torch.zeros(4, 24, dtype=torch.int32, device=tables.device)
    apart = (whole[:, :8], whole[:, 8:16])  # columns of one matrix
    tables.gather_block_tables(rows, 1, out=apart)
    assert whole[0].count_nonzero() > 2
    flat = torch.zeros(100, dtype=torch.int32, device=tables.device)
    for first, second in (
        (whole[:, :8], whole[:, 7:15]),
        (whole[:, 8:16], whole[:, :9]),
        (flat[:64].view(8, 8), flat[63:95].view(4, 8)),
        (flat[40:64].view(3, 8), flat[:64].view(4, 16)[:, :9]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"out\[1\]: .* the memory of out\[0\]"):
            tables.gather_block_tables(rows, 1, out=(first, second))
    slots_part = tables.slot_mappings.view(torch.int32).reshape(-1)[:16].view(2, 8)
    other = torch.zeros(2, 8, dtype=torch.int32, device=tables.device)
    with pytest.raises(InvalidArgumentError, match=r"out\[0\]: expected memory outside"):
        tables.gather_block_tables(rows, 1, out=(slots_part, other))


def test_row_lengths_are_read_only_for_callers(tables: AscendBlockTables) -> None:
    with pytest.raises(ValueError, match="read-only"):
        tables.num_blocks.np[0, 0] = -5


def test_a_capacity_that_is_more_than_was_said_is_explained() -> None:
    tables = build(groups=[KVCacheGroup(16, 4, name="full")])
    tables.append_block_ids(0, [[1] * 7], overwrite=False)
    with pytest.raises(RowCapacityError) as raised:
        tables.append_block_ids(0, [[1, 2]], overwrite=False)
    assert (
        "group 0 (full): expected at most 8 columns in the row (4 of max_num_blocks, aligned to "
        "whole multiples of 128 tokens); got 9 > 8"
    ) in str(raised.value)


def test_an_error_about_one_of_nine_groups_names_it() -> None:
    with pytest.raises(ConfigurationError) as raised:
        AscendBlockTables(
            [16] * 9, 2, 8, [4] * 9, "cpu", kernel_block_sizes=[16] * 8 + [12]
        )
    assert str(raised.value).startswith("groups[8]: kernel_block_size: expected a divisor")
    with pytest.raises(ConfigurationError, match=r"^group \(draft\): kernel_block_size: expected"):
        KVCacheGroup(16, 4, 12, name="draft")


def test_a_manager_says_what_it_is(tables: AscendBlockTables) -> None:
    text = repr(tables)
    assert "2 groups (full: paged, 8 columns of 16, 1: paged, 8 columns of 32)" in text
    assert "4 rows, 16 tokens" in text
    assert f"{tables._backend.name} backend on {tables.device}>" in text


def test_a_fault_names_its_group(tables: AscendBlockTables) -> None:
    slots(tables, [(0, [100])])
    named, unnamed = tables.take_faults()
    assert (named.group_name, str(named)) == (
        "full",
        "1 x column out of row in group 0 (full)",
    )
    assert str(unnamed) == "1 x column out of row in group 1"
