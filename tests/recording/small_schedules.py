"""Small schedules made by hand, good and spoiled, for the tests of replay, check and demo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fused_slots import KVCacheGroup, SlotMappingMode
from fused_slots.recording.schedule import Append, Schedule, ScheduleStep

GROUPS = (
    KVCacheGroup(block_size=8, kernel_block_size=4, max_num_blocks=4, name="full"),
    KVCacheGroup(block_size=4, max_num_blocks=8, sliding_window_reach=4, name="sliding"),
    KVCacheGroup(
        block_size=64, max_num_blocks=1, slot_mapping_mode=SlotMappingMode.NONE, name="state"
    ),
    KVCacheGroup(
        block_size=4, max_num_blocks=1, circular=True, prefix_cacheable=False, name="ring"
    ),
)


def steps() -> list[ScheduleStep]:
    """Two requests: one of 8 + 1 tokens, one with a prefix hit of 8 tokens that then decodes."""
    first = ScheduleStep(
        appends=(Append(2, ([1], [2, 3], [4], [5]), True),),
        request_ids=np.array([0], np.int32),
        idx_mapping=np.array([2], np.int32),
        query_start_loc=np.array([0, 8], np.int32),
        positions=np.arange(8),
        num_computed_tokens=np.zeros(4, np.int32),
        expected_blocks=truth([[1]], [[2, 3]], [[4]], [[5]]),
    )
    second = ScheduleStep(
        appends=(
            Append(2, ([6], [7], [], []), False),
            Append(0, ([1, 8], [2, 3, 9], [10], [11]), True),
        ),
        request_ids=np.array([1, 0], np.int32),
        idx_mapping=np.array([0, 2], np.int32),
        query_start_loc=np.array([0, 2, 3], np.int32),
        positions=np.array([8, 9, 8]),
        num_computed_tokens=np.array([8, 0, 8, 0], np.int32),
        expected_blocks=truth([[1, 8], [1, 6]], [[2, 3, 9], [0, 3, 7]], [[10], [4]], [[11], [5]]),
        events=("prefix hit 8 of 1",),
    )
    third = ScheduleStep(
        appends=(),
        request_ids=np.array([1], np.int32),
        idx_mapping=np.array([0], np.int32),
        query_start_loc=np.array([0, 1], np.int32),
        positions=np.array([10]),
        num_computed_tokens=np.array([10, 0, 8, 0], np.int32),
        expected_blocks=truth([[1, 8]], [[0, 3, 9]], [[10]], [[11]]),
        events=("preempted 0",),
    )
    return [first, second, third]


def truth(*groups: list[list[int]]) -> tuple[tuple[np.ndarray, ...], ...]:
    """`expected_blocks` from nested lists: group, batch entry, block ids."""
    return tuple(tuple(np.array(held, np.int32) for held in entries) for entries in groups)


def schedule(spoil: Callable[[list[ScheduleStep]], list[ScheduleStep]] = list) -> Schedule:
    """The small schedule, after `spoil` has changed its steps."""
    return Schedule.from_steps(
        spoil(steps()),
        name="small",
        groups=GROUPS,
        max_num_reqs=4,
        max_num_batched_tokens=16,
        num_blocks=32,
        metadata={"description": "made by hand"},
    )


def with_truth(step: ScheduleStep, group: int, entry: int, held: list[int]) -> ScheduleStep:
    """`step` with other blocks held by the KV manager for one entry of one group."""
    blocks = [list(entries) for entries in step.expected_blocks]
    blocks[group][entry] = np.array(held, np.int32)
    return replace(step, expected_blocks=tuple(tuple(entries) for entries in blocks))
