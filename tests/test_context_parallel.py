"""Context parallelism: each token on exactly one rank, every rank a process of its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests import cp_ranks
from tests.cp_ranks import Case


@pytest.fixture(scope="module")
def ranks() -> list[dict[Case, list[list[int]]]]:
    """Per rank, its slots in every case, each rank from a process of its own."""
    return cp_ranks.answers_of_processes()


def test_every_token_is_on_exactly_one_rank(ranks: list[dict[Case, list[list[int]]]]) -> None:
    for case in cp_ranks.cases():
        sharded = np.array([ranks[rank][case][0] for rank in range(case.size)])
        owners = (sharded >= 0).sum(axis=0)
        assert (owners == 1).all(), case


def test_ranks_of_one_group_fill_their_blocks_alike(
    ranks: list[dict[Case, list[list[int]]]],
) -> None:
    """On a rank no two tokens share a slot, and each rank's tokens lie dense in its blocks."""
    for case in cp_ranks.cases():
        ids = cp_ranks.block_ids(case)
        for rank in range(case.size):
            mine = [slot for slot in ranks[rank][case][0] if slot >= 0]
            places = [
                ids.index(slot // case.block_size) * case.block_size + slot % case.block_size
                for slot in mine
            ]
            assert places == list(range(len(mine))), (case, rank)


def test_tokens_go_to_the_ranks_in_stripes(ranks: list[dict[Case, list[list[int]]]]) -> None:
    for case in cp_ranks.cases():
        for token in range(cp_ranks.TOKENS):
            owner = token // case.interleave % case.size
            assert ranks[owner][case][0][token] >= 0, (case, token)


def test_a_replicated_group_is_whole_on_every_rank(
    ranks: list[dict[Case, list[list[int]]]],
) -> None:
    for case in cp_ranks.cases():
        expected = [case.block_size + token for token in range(cp_ranks.TOKENS)]
        for rank in range(case.size):
            assert ranks[rank][case][1] == expected, (case, rank)
