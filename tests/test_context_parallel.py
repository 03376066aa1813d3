"""Context parallelism over real processes: every token on exactly one rank, slots never shared.

Each process builds its own rank's manager over the same rows and maps the same batch; the slots
are gathered from all ranks over a loopback process group and judged in the parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.reference import slot_mappings
from tests.backends_under_test import MakeTables
from tests.backends_under_test import slots as slots_of

ROOT = Path(__file__).parent.parent

# One rank: reads the cases, answers each with all ranks' slots, as seen by this rank.
RANK = """
import json, sys
import torch
import torch.distributed as dist
from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup

rank, size, store, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.load(sys.stdin)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
assert dist.get_world_size() == size
answers = []
for case in cases:
    tables = AscendBlockTables.from_groups(
        [KVCacheGroup(**group) for group in case["groups"]],
        max_num_reqs=4,
        max_num_batched_tokens=case["capacity"],
        context_parallel=ContextParallel(size, dist.get_rank(), case["interleave"]),
    )
    for row, ids in enumerate(case["rows"]):
        tables.append_block_ids(row, ids, overwrite=True)
    tables.step(
        torch.tensor(case["idx_mapping"], dtype=torch.int32),
        torch.tensor(case["query_start_loc"], dtype=torch.int32),
        torch.tensor(case["positions"], dtype=torch.int64),
    )
    ranks = [torch.empty_like(tables.slot_mappings) for _ in range(size)]
    dist.all_gather(ranks, tables.slot_mappings)
    tables.check_integrity()
    assert not tables.take_faults()
    answers.append([slots.tolist() for slots in ranks])
print(json.dumps(answers))
dist.destroy_process_group()
"""

SHARDED, REPLICATED = range(2)


def case(block_size: int, kernel_block_size: int, interleave: int, size: int) -> dict[str, Any]:
    """Two requests with private blocks: a prefill from 0, and a decode far up."""
    sizes = {"block_size": block_size, "kernel_block_size": kernel_block_size}
    groups = [
        {**sizes, "max_num_blocks": 32},
        {**sizes, "max_num_blocks": 32 * size, "dcp_sharded": False},
    ]
    virtual = block_size * size
    long, start = 3 * virtual + 5, 2 * virtual - 3
    positions = [*range(long), *range(start, start + 7)]
    firsts = [(1 + 40 * row, 1 + 50 * size * row) for row in range(2)]
    rows = [
        [list(range(sharded, sharded + 8)), list(range(whole, whole + 5 * size))]
        for sharded, whole in firsts
    ]
    return {
        "groups": groups,
        "interleave": interleave,
        "capacity": len(positions) + 3,
        "rows": rows,
        "idx_mapping": [0, 1],
        "query_start_loc": [0, long, long + 7],
        "positions": positions,
    }


def columns(group: KVCacheGroup, block_ids: list[int]) -> list[int]:
    n = group.columns_per_block
    return [block_id * n + part for block_id in block_ids for part in range(n)]


def cases(size: int) -> list[dict[str, Any]]:
    ratios = [(16, 16), (32, 8), (12, 4)]
    return [
        case(block_size, kernel_block_size, interleave, size)
        for block_size, kernel_block_size in ratios
        for interleave in (1, 4, block_size)
    ]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(size, cases, per case the slots of all ranks), from `size` processes that agree on them."""
    size = request.param
    store = tmp_path_factory.mktemp("ranks") / "store"
    given = cases(size)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(store)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    answers = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == len(given)
    return size, given, answers[0]


def test_every_token_of_a_sharded_group_is_on_exactly_one_rank(ranks: Any) -> None:
    _, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        for token in range(len(batch["positions"])):
            owners = [slots[SHARDED][token] >= 0 for slots in slots_of_ranks]
            assert sum(owners) == 1, (batch["groups"], batch["interleave"], token)


def test_every_rank_owns_tokens(ranks: Any) -> None:
    """Else "exactly one rank" could mean always the same."""
    _, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        for slots in slots_of_ranks:
            assert sum(slot >= 0 for slot in slots[SHARDED]) >= batch["groups"][0]["block_size"]


def test_every_token_of_a_replicated_group_is_on_all_ranks_alike(ranks: Any) -> None:
    _, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        num_tokens = len(batch["positions"])
        assert all(slot >= 0 for slot in slots_of_ranks[0][REPLICATED][:num_tokens])
        assert all(slots[REPLICATED] == slots_of_ranks[0][REPLICATED] for slots in slots_of_ranks)


def test_slots_of_one_rank_never_collide(ranks: Any) -> None:
    for slots_of_ranks in ranks[2]:
        for slots in slots_of_ranks:
            for group_slots in slots:
                written = [slot for slot in group_slots if slot >= 0]
                assert len(set(written)) == len(written)


def test_slots_lie_in_the_blocks_of_the_tokens_request(ranks: Any) -> None:
    _, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        starts = batch["query_start_loc"]
        for slots in slots_of_ranks:
            for g, group_slots in enumerate(slots):
                block_size = batch["groups"][g]["block_size"]
                for row in range(2):
                    written = group_slots[starts[row] : starts[row + 1]]
                    blocks = {slot // block_size for slot in written if slot >= 0}
                    assert blocks <= set(batch["rows"][row][g])


def test_padding_reaches_the_capacity_on_every_rank(ranks: Any) -> None:
    _, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        for slots in slots_of_ranks:
            for group_slots in slots:
                assert group_slots[len(batch["positions"]) :] == [-1] * 3


def test_every_rank_agrees_with_the_oracle(ranks: Any) -> None:
    size, given, answers = ranks
    for batch, slots_of_ranks in zip(given, answers, strict=True):
        groups = [KVCacheGroup(**group) for group in batch["groups"]]
        rows = [[columns(group, ids[g]) for ids in batch["rows"]] for g, group in enumerate(groups)]
        for rank, slots in enumerate(slots_of_ranks):
            assert slots == slot_mappings(
                groups,
                rows,
                batch["idx_mapping"],
                batch["query_start_loc"],
                batch["positions"],
                batch["capacity"],
                ContextParallel(size, rank, batch["interleave"]),
            )


@pytest.mark.parametrize("size", range(1, 9))
def test_every_size_within_one_process(size: int) -> None:
    for batch in cases(size):
        groups = [KVCacheGroup(**group) for group in batch["groups"]]
        slots_of_ranks = []
        for rank in range(size):
            tables = MakeTables("cpu")(
                groups,
                dict(enumerate(batch["rows"])),
                context_parallel=ContextParallel(size, rank, batch["interleave"]),
                max_num_batched_tokens=batch["capacity"],
            )
            starts, positions = batch["query_start_loc"], batch["positions"]
            requests = [(row, positions[starts[row] : starts[row + 1]]) for row in range(2)]
            slots_of_ranks.append(slots_of(tables, requests))
            tables.check_integrity()
        for token in range(len(batch["positions"])):
            owners = [of_rank[SHARDED][token] for of_rank in slots_of_ranks]
            assert sum(slot >= 0 for slot in owners) == 1
            assert len({of_rank[REPLICATED][token] for of_rank in slots_of_ranks}) == 1
