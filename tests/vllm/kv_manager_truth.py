"""Slots judged by the blocks that vLLM's KV cache manager holds, and by who owns them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fused_slots.groups import NULL_BLOCK_ID, KVCacheGroup
from fused_slots.recording.schedule import ScheduleStep


def check_slots(step: ScheduleStep, g: int, group: KVCacheGroup, slots: Any) -> int:
    """Every token of the step lies in the block that the manager holds for it.

    A Mamba group's table is mapped as pages are; where the manager has freed a state by then it
    has no opinion.
    """
    compared = 0
    for b, held in enumerate(step.expected_blocks[g]):
        start, end = step.query_start_loc[b : b + 2]
        for t in range(start, end):
            position = int(step.positions[t])
            column, offset = divmod(position, group.block_size)
            block = int(held[column]) if column < len(held) else NULL_BLOCK_ID
            if block == NULL_BLOCK_ID and not group.maps_slots:
                continue
            assert block != NULL_BLOCK_ID, (step.request_ids[b], position)
            assert slots[t] == block * group.block_size + offset
            compared += 1
    return compared


class SlotOwners:
    """No two live tokens of different requests have one slot.

    Args:
        loop: its KV cache manager says which blocks a request still holds.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._owner: list[dict[int, tuple[str, int]]] = [{} for _ in loop.groups]
        self._live: set[str] = set()
        self.num_tokens = 0

    def forget(self, request_ids: set[str]) -> None:
        """These requests have given their blocks back."""
        self._live -= request_ids

    def write(self, step: ScheduleStep, g: int, group: KVCacheGroup, slots: Any) -> None:
        """Note who writes the step's slots."""
        lengths = np.diff(step.query_start_loc)
        requests = np.repeat(step.request_ids, lengths).astype(str)
        self._live |= set(requests.tolist())
        for t, (request, position) in enumerate(
            zip(requests.tolist(), step.positions.tolist(), strict=True)
        ):
            slot = int(slots[t])
            other, other_position = self._owner[g].get(slot, (request, position))
            if (other, other_position) != (request, position):
                assert not self._holds(other, g, other_position // group.block_size, slot, group), (
                    f"slot {slot} of group {g} is token {other_position} of {other} and token "
                    f"{position} of {request}"
                )
            self._owner[g][slot] = (request, position)
            self.num_tokens += 1

    def _holds(self, request: str, g: int, column: int, slot: int, group: KVCacheGroup) -> bool:
        """Whether a live request still has the block that the slot is in."""
        if request not in self._live:
            return False
        held = self._loop._scheduler.kv_cache_manager.get_block_ids(request)[g]
        return column < len(held) and held[column] == slot // group.block_size
