"""v1 tables in a real decode context parallel group of two processes, made by vLLM over gloo."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

from fused_slots import PAD_SLOT_ID
from tests.vllm.dcp_rank import BLOCK_SIZES, INTERLEAVES, LENGTHS, run_rank


def test_each_token_has_one_slot_on_one_rank(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run_rank, args=(rank, 2, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for i, interleave in enumerate(INTERLEAVES):
        check_ranks(interleave, [of_rank[i] for of_rank in found])


def check_ranks(interleave: int, found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        groups = [[2, rank]] * len(BLOCK_SIZES)
        assert of_rank["group of ours"] == of_rank["group of vllm's"] == groups
        assert of_rank["ours"] == of_rank["vllm's"]
    for g, size in enumerate(BLOCK_SIZES):
        by_rank = [of_rank["ours"][g] for of_rank in found]
        tokens = [(row, p) for row, length in enumerate(LENGTHS) for p in range(length)]
        for token, (row, position) in enumerate(tokens):
            slots = [slots[token] for slots in by_rank]
            owner = position // interleave % 2
            local = position // (2 * interleave) * interleave + position % interleave
            assert slots[1 - owner] == PAD_SLOT_ID
            assert slots[owner] == (10 * (row + 1) + local // size) * size + local % size
        assert {slot for slots in by_rank for slot in slots[len(tokens) :]} == {PAD_SLOT_ID}
