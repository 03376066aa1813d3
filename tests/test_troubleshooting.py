"""The messages that docs/troubleshooting.md shows are those that users get."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fused_slots import AscendBlockTables, BlockTableError, ContextParallel, KVCacheGroup

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
SHOWN = [
    ".*".join(map(re.escape, message.split("...")))
    for cell in re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
    for message in re.findall(r"`(.*?)`", cell)
    if " " in message
]

ROW, STARTS = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)


def tables(**settings: object) -> AscendBlockTables:
    group = KVCacheGroup(block_size=16, max_num_blocks=8)
    sizes = {"max_num_reqs": 2, "max_num_batched_tokens": 8}
    return AscendBlockTables.from_groups([group], **{**sizes, **settings})


def ring(**fields: object) -> KVCacheGroup:
    return KVCacheGroup(**{"block_size": 8, "max_num_blocks": 1, "circular": True, **fields})


def pools_with_staged_writes() -> None:
    staged = tables()
    staged.append_block_ids(0, [[1]], overwrite=True)
    staged.resize_pools(4)


def recorded_twice() -> None:
    recorded = tables()
    recorded.start_recording(2)
    recorded.start_recording(2)


CASES: dict[str, Callable[[], object]] = {
    "split": lambda: KVCacheGroup(block_size=16, max_num_blocks=1, kernel_block_size=5),
    "interleave": lambda: tables(context_parallel=ContextParallel(2, 0, 3)),
    "sharded ring": lambda: AscendBlockTables.from_groups(
        [ring(dcp_sharded=True)],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        context_parallel=ContextParallel(2),
    ),
    "ring of two": lambda: ring(max_num_blocks=2),
    "cacheable ring": lambda: ring(prefix_cacheable=True),
    "pool": lambda: tables(num_blocks=2**30, slot_dtype=torch.int32),
    "null block": lambda: AscendBlockTables.from_groups(
        [KVCacheGroup(block_size=16, max_num_blocks=1, kernel_block_size=8)],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        null_block_id=2**30,
    ),
    "rows": lambda: tables(max_num_reqs=2**31 - 1),
    "device": lambda: tables(device="gpu"),
    "dtype": lambda: tables().step(ROW.float(), STARTS, torch.tensor([0])),
    "row": lambda: tables().append_block_ids(2, [[1]], overwrite=True),
    "lists": lambda: tables().append_block_ids(0, [[1], [2]], overwrite=True),
    "decreasing": lambda: tables().step(ROW, -STARTS, torch.tensor([0])),
    "first": lambda: tables().step(ROW, STARTS + 1, torch.tensor([0, 0])),
    "replay": lambda: tables().step(ROW, STARTS, torch.tensor([0]), replay_len=ROW),
    "pools": pools_with_staged_writes,
    "not recorded": lambda: tables().save_recording("x"),
    "recorded twice": recorded_twice,
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_message_that_users_get_is_shown(call: Callable[[], object]) -> None:
    with pytest.raises(BlockTableError) as error:
        call()
    message = str(error.value)
    assert any(re.match(pattern, message) for pattern in SHOWN), message
