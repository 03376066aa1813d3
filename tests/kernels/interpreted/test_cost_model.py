"""Bytes of the cost model are those of a GPU manager's buffers."""

from __future__ import annotations

import pytest
import torch

from fused_slots import AscendBlockTables, ContextParallel
from fused_slots.cost_model import Load, table_bytes


@pytest.mark.parametrize(
    "load",
    [
        Load(5, (16, 32, 16), 1000, 64),
        Load(3, (16,), 40_000, 64, slot_bytes=4),
        Load(7, (16, 64), 4096, 128, ranks=2),
        Load(300, (16, 32, 64, 128, 256, 16), 500, 2048),
    ],
)
def test_bytes_are_those_of_a_manager(load: Load) -> None:
    tables = AscendBlockTables.from_groups(
        load.groups,
        max_num_reqs=load.requests,
        max_num_batched_tokens=load.max_num_batched_tokens,
        context_parallel=ContextParallel(load.ranks),
        slot_dtype=torch.int64 if load.slot_bytes == 8 else torch.int32,
    )
    found = {}
    for value in vars(tables._backend).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    assert sum(found.values()) == sum(table_bytes(load.layout).values())
