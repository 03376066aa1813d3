"""The mapping without a manager: one request's slots from its blocks, on the host.

For KV connectors, offloading and tests, which know a request's allocation blocks and need no
tables. The columns of a split block follow each other, so a slot is `block id * K + offset in the
block` whatever the kernel's block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fused_slots.faults import (
    INT32_MAX,
    BlockIdError,
    BlockTableError,
    InvalidArgumentError,
    require_int,
)
from fused_slots.groups import (
    PAD_SLOT_ID,
    ContextParallel,
    KVCacheGroup,
    check_shard,
    require_context_parallel,
)

Integers = Sequence[int] | npt.NDArray[np.integer]


def slots_of(
    group: KVCacheGroup,
    block_ids: Integers,
    positions: Integers,
    context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
    *,
    null_block_id: int | None = None,
) -> npt.NDArray[np.int64]:
    """Slots of one request's tokens in one group, as `compute_slot_mappings` gives them.

    Args:
        group: the KV cache group.
        block_ids: the request's allocation blocks, in order; integers in [0, int32].
        positions: logical positions, int64; [T].
        context_parallel: size, rank and interleave; the result is this rank's.
        null_block_id: an allocation block that is never written; None = there is none.

    Returns:
        int64 [T]; PAD_SLOT_ID where the group maps no slots, the position is negative, another
        rank owns the token, no block covers it, or the block is the null block.

    Raises:
        BlockIdError: an id is no integer in range, or a ring has more than one block.
        InvalidArgumentError: `group` or `positions` is none.
        ConfigurationError: the group cannot be dealt to these ranks.

    >>> slots_of(KVCacheGroup(block_size=16, max_num_blocks=4), [3, 7], [15, 16, 32]).tolist()
    [63, 112, -1]
    """
    if not isinstance(group, KVCacheGroup):
        raise InvalidArgumentError("group", expected="a KVCacheGroup", actual=repr(group))
    ids = _block_ids(block_ids, group.columns_per_block)
    tokens = _integers("positions", positions, InvalidArgumentError)
    if group.maps_slots and not group.kind.is_paged and len(ids) > 1:
        raise BlockIdError("block_ids", expected="one block: a ring", actual=f"{len(ids)} blocks")
    if not group.maps_slots:
        return np.full(len(tokens), PAD_SLOT_ID, np.int64)
    interleave = require_context_parallel(context_parallel).interleave
    check_shard(group, context_parallel, f"the group ({group.name})" if group.name else "the group")
    size, rank = context_parallel.shards(group)
    if not group.kind.is_paged:
        block, offset = group.kind.locate(tokens, group.block_size)
        mapped = tokens >= 0
    else:
        block, within = np.divmod(tokens, group.block_size * size)
        stripe = within // interleave
        offset = stripe // size * interleave + within % interleave
        mapped = (tokens >= 0) & (stripe % size == rank)
    mapped &= block < len(ids)
    held = np.append(ids, PAD_SLOT_ID)[np.where(mapped, block, -1)]
    if null_block_id is not None:
        mapped &= held != require_int("null_block_id", null_block_id, minimum=0)
    return np.where(mapped, held * group.block_size + offset, PAD_SLOT_ID)


def kernel_block_ids(block_ids: Integers, columns_per_block: int) -> npt.NDArray[np.int32]:
    """Table columns of allocation blocks: block k becomes k·n … k·n + n - 1.

    Args:
        block_ids: allocation block ids, [M].
        columns_per_block: n, kernel blocks of one allocation block, >= 1.

    Returns:
        int32 [M · n].

    Raises:
        BlockIdError: an id is no integer, or a column's id would leave int32.
        ConfigurationError: `columns_per_block` is no positive int32.

    >>> kernel_block_ids([3, 7], 2).tolist()
    [6, 7, 14, 15]
    """
    n = require_int("columns_per_block", columns_per_block, minimum=1)
    first = _block_ids(block_ids, n) * n
    return (first[:, None] + np.arange(n)).reshape(-1).astype(np.int32)


def _block_ids(block_ids: Integers, columns_per_block: int) -> npt.NDArray[np.int64]:
    ids = _integers("block_ids", block_ids, BlockIdError)
    limit = (INT32_MAX - (columns_per_block - 1)) // columns_per_block
    wrong = np.flatnonzero((ids < 0) | (ids > limit))
    if len(wrong):
        raise BlockIdError(
            f"block_ids, entry {wrong[0]}",
            expected=f"an id in [0, {limit}], whose {columns_per_block} columns fit int32",
            actual=str(ids[wrong[0]]),
        )
    return ids


def _integers(
    argument: str, values: Integers, error: type[BlockTableError]
) -> npt.NDArray[np.int64]:
    """A list or an array of integers of any type, widened to int64."""
    expected = "a list or 1-D array of integers"
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(argument, expected=expected, actual=str(ragged)) from ragged
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise error(argument, expected=expected, actual=f"{array.ndim}-D {array.dtype}")
    # NumPy takes a bool among ints for 0 or 1.
    if not isinstance(values, np.ndarray) and {bool, np.bool_} & set(map(type, values)):
        raise error(argument, expected=expected, actual="a bool among them")
    widened = array.astype(np.int64)
    if array.dtype.kind == "u" and (widened < 0).any():
        raise error(argument, expected="integers of int64", actual=str(array.max()))
    return widened
