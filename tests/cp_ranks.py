"""Every rank of a context parallel group in a process of its own, as an engine runs them."""

from __future__ import annotations

import multiprocessing
from typing import NamedTuple

import torch

from fused_slots import AscendBlockTables, ContextParallel, KVCacheGroup


class Case(NamedTuple):
    """Context parallel size, interleave, and the block sizes of a sharded group."""

    size: int
    interleave: int
    block_size: int
    kernel_block_size: int


TOKENS = 150


def cases() -> list[Case]:
    """Sizes 1 to 8, interleaves, and block sizes that are even and odd multiples of both."""
    return [
        Case(size, interleave, kernel_size * interleave * ratio, kernel_size * interleave)
        for size in range(1, 9)
        for interleave in (1, 2, 3, 8)
        for kernel_size in (1, 3, 4)
        for ratio in (1, 2, 3)
    ]


def block_ids(case: Case) -> list[int]:
    """The same ids on every rank, as the scheduler deals them: descending, none of them 0."""
    count = -(-TOKENS // (case.block_size * case.size))
    return list(range(count + 2, 2, -1))


def slots_of_rank(case: Case, rank: int) -> list[list[int]]:
    """A rank's slots of one request's tokens, in a sharded and in a replicated group."""
    replicated = -(-TOKENS // case.block_size)
    group = KVCacheGroup(case.block_size, replicated, case.kernel_block_size)
    whole = KVCacheGroup(case.block_size, replicated, case.kernel_block_size, dcp_sharded=False)
    tables = AscendBlockTables.from_groups(
        [group, whole],
        max_num_reqs=1,
        max_num_batched_tokens=TOKENS,
        context_parallel=ContextParallel(case.size, rank, case.interleave),
    )
    tables.append_block_ids(0, (block_ids(case), list(range(1, replicated + 1))), overwrite=True)
    _, slots = tables.step(
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS, dtype=torch.int64),
    )
    assert not tables.take_faults()
    result: list[list[int]] = slots.tolist()
    return result


def answer_all(rank: int) -> dict[Case, list[list[int]]]:
    """What one process answers: its slots in every case that has this rank."""
    torch.set_num_threads(1)
    return {case: slots_of_rank(case, rank) for case in cases() if rank < case.size}


def answers_of_processes() -> list[dict[Case, list[list[int]]]]:
    """The answers of eight processes, one per rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cp_ranks"])
    with context.Pool(8, maxtasksperchild=1) as pool:
        return pool.map(answer_all, range(8), chunksize=1)
