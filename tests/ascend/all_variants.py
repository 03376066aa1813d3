"""Every kernel variant that a plan can choose on Ascend, found by asking managers of every kind.

What a variant depends on is whether sizes are powers of two, groups are sharded, one is a ring,
tokens are replayed, and the dtypes: so one manager of each combination knows them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product

import torch
from compile import ASCEND_910B3
from hivm_backend import executed_on
from kernel_cases import FIRST_OF_THREE, OTHERS, POWERS, RING, SECOND_OF_TWO, Setup

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.backends.launch import Variant

OTHER_RING = KVCacheGroup(block_size=24, max_num_blocks=1, circular=True, prefix_cacheable=False)
REPLAY_WINDOW = 40


NULL_BLOCK = 3


def _setup(
    powers: bool, sharded: bool, ring: bool, slot_dtype: torch.dtype, nulls: bool = False
) -> tuple[str, Setup]:
    """One combination, and its name."""
    groups = (POWERS if powers else OTHERS) + ((RING if powers else OTHER_RING,) * ring)
    rank = SECOND_OF_TWO if powers else FIRST_OF_THREE
    words = [
        "powers" if powers else "others",
        *["sharded"] * sharded,
        *["ring"] * ring,
        *["nulls"] * nulls,
        str(slot_dtype).removeprefix("torch."),
    ]
    return "_".join(words), Setup(
        groups,
        rank if sharded else ContextParallel(),
        slot_dtype=slot_dtype,
        replay_window=REPLAY_WINDOW,
        null_block_id=NULL_BLOCK if nulls else None,
    )


def _setups() -> dict[str, Setup]:
    flags = product((True, False), (True, False), (True, False), (torch.int32, torch.int64))
    return dict(_setup(*choice) for choice in flags if not (choice[1] and choice[2]))


def _rare_setups() -> dict[str, Setup]:
    """Rings on every rank beside sharded groups, and null blocks."""
    return dict([
        _setup(True, True, True, torch.int64),
        _setup(False, True, True, torch.int32, nulls=True),
        _setup(True, False, True, torch.int32, nulls=True),
        _setup(False, False, False, torch.int64, nulls=True),
    ])  # fmt: skip


RARE = _rare_setups()
"""Of these kinds CI takes the variants that cover most; bench/verify_ascend.py takes all."""
KINDS = _setups() | RARE
"""A configuration for each combination; all of them also run without replay."""


@cache
def variants_by_kind() -> dict[str, list[Variant]]:
    """Every variant, under the first configuration that has it; for all targets the same."""
    known: set[Variant] = set()
    found: dict[str, list[Variant]] = {}
    for kind, setup in KINDS.items():
        with executed_on(ASCEND_910B3):
            backend = setup.make()._backend
        found[kind] = [variant for variant in backend.variants() if variant not in known]
        known.update(found[kind])
    return found


def pairwise(variants: Iterable[Variant]) -> list[Variant]:
    """The fewest variants, found greedily, among which every two choices occur together.

    A choice is a kernel with a value of one of its constants or dtypes; two choices that no
    variant combines are left out.
    """
    missing = {variant: _pairs(variant) for variant in variants}
    chosen = []
    while any(missing.values()):
        best = max(missing, key=lambda variant: len(missing[variant]))
        chosen.append(best)
        covered = missing.pop(best)
        for pairs in missing.values():
            pairs -= covered
    return chosen


def _pairs(variant: Variant) -> set[frozenset[tuple[str, str, str]]]:
    choices = [
        (variant.kernel, name, str(value))
        for name, value in (
            ("index", variant.index_dtype),
            ("slot", variant.slot_dtype),
            *variant.constants,
        )
    ]
    return {frozenset(pair) for pair in combinations(choices, 2)}
