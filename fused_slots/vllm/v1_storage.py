"""What all KV cache groups' v1 tables share: one manager, its host mirror, and their commit.

The v1 runner keeps its rows in host memory, writes into them directly, and commits the first rows
of each step. A batch entry is its row, so the manager's tables are the mirror's image and its slot
mapping runs over rows 0, 1, 2, ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.arguments import check_count
from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import InvalidArgumentError
from fused_slots.groups import PAD_SLOT_ID, SlotMappingMode

BlockIds = Sequence[int]
Indices = Sequence[int] | npt.NDArray[Any] | torch.Tensor


class HostDeviceBuffer:
    """A host array and the device tensor that it is copied to.

    Args:
        cpu: the host tensor; `np` is a NumPy view of it.
        gpu: the device tensor, of the same shape and dtype.
    """

    def __init__(self, cpu: torch.Tensor, gpu: torch.Tensor) -> None:
        self.cpu = cpu
        self.gpu = gpu
        self.np: npt.NDArray[Any] = cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Copy the first `n` rows to the device, or all of them; returns the device tensor."""
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)

    def copy_to_cpu(self, n: int | None = None) -> torch.Tensor:
        """The other way round; the host must wait for the device before it reads them."""
        return self.cpu[:n].copy_(self.gpu[:n], non_blocking=True)


class Storage:
    """Rows of all groups on the host, and the manager that has them on the device.

    Args:
        manager: its tables become the mirror's image; it must be new.
        pin_memory: page-lock the mirror, where the device is not the host itself.
    """

    def __init__(self, manager: AscendBlockTables, pin_memory: bool) -> None:
        self.manager = manager
        self.lengths = manager.num_blocks.np
        layout, backend = manager.layout, manager._backend
        on_host = manager.device.type == "cpu"
        mirror = torch.zeros(
            layout.arena_size, dtype=torch.int32, pin_memory=pin_memory and not on_host
        )
        self._mirror, self._arena = mirror, backend.arena
        rows = layout.max_num_reqs
        self.tables = [
            HostDeviceBuffer(mirror[offset : offset + rows * width].view(rows, width), table)
            for offset, width, table in zip(
                layout.offsets, layout.widths, backend.tables, strict=False
            )
        ]
        self.slots = [
            HostDeviceBuffer(
                row if on_host else torch.full_like(row, PAD_SLOT_ID, device="cpu"), row
            )
            for row in manager.slot_mappings
        ]
        self._batch_rows = torch.arange(rows, dtype=torch.int32, device=manager.device)
        self._committed = np.zeros_like(self.lengths)
        """The row lengths that the device has."""
        self._parts = [np.arange(group.columns_per_block) for group in layout.groups]
        self._cacheable = torch.tensor(
            [[g.maps_slots and g.prefix_cacheable] for g in layout.groups],
            dtype=torch.bool,
            device=manager.device,
        )
        self._scratch: torch.Tensor | None = None

    @property
    def scratch(self) -> torch.Tensor:
        """Slots of all groups, of which a caller wants one group's."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.manager.slot_mappings)
        return self._scratch

    def write_row(self, row: int, block_ids: Sequence[BlockIds], overwrite: bool) -> None:
        """Append blocks to a row in every group, or start it anew; for all groups or for none.

        Raises:
            InvalidArgumentError, BlockIdError, RowCapacityError: as `append_block_ids`.
        """
        before = self._lengths_of(row)
        # The manager checks and counts; the ids go into the mirror instead of its staged writes.
        self.manager.append_block_ids(row, block_ids, overwrite)
        self.manager._rows.clear()
        for g, ids in enumerate(block_ids):
            self._fill(g, row, ids, 0 if overwrite else before[g], before[g])

    def write_group_row(self, g: int, row: int, block_ids: BlockIds, overwrite: bool) -> None:
        """The same for one group; the others keep their rows."""
        before = self._lengths_of(row)[g]
        lists: list[BlockIds] = [()] * len(self.tables)
        lists[g] = block_ids
        if overwrite:
            self.lengths[g, row] = 0
        try:
            self.manager.append_block_ids(row, lists, False)
        except Exception:
            self.lengths[g, row] = before
            raise
        self.manager._rows.clear()
        self._fill(g, row, block_ids, 0 if overwrite else before, before)

    def clear_row(self, row: int, groups: Sequence[int]) -> None:
        """Empty a row: no block, and no stale entry that a kernel could take for a state slot."""
        self._check_row("row_idx", row)
        for g in groups:
            self.tables[g].np[row] = 0
            self.lengths[g, row] = 0

    def move_row(self, src: int, tgt: int, groups: Sequence[int]) -> None:
        """Row `tgt` becomes what `src` was; `src` is empty afterwards."""
        self._check_row("src", src)
        self._check_row("tgt", tgt)
        if src == tgt:
            return
        for g in groups:
            self.tables[g].np[tgt] = self.tables[g].np[src]
            self.lengths[g, tgt] = self.lengths[g, src]
        self.clear_row(src, groups)

    def swap_row(self, src: int, tgt: int, groups: Sequence[int]) -> None:
        """Exchange two rows."""
        self._check_row("src", src)
        self._check_row("tgt", tgt)
        pair, swapped = [src, tgt], [tgt, src]
        for g in groups:
            self.tables[g].np[pair] = self.tables[g].np[swapped]
            self.lengths[g, pair] = self.lengths[g, swapped]

    def commit(self, num_reqs: int, groups: Sequence[int]) -> None:
        """Copy the first rows of these groups to the device, as the mirror holds them now.

        One transfer where the rows lie side by side (all rows of all groups), one per group
        otherwise; row lengths follow only if one of them changed.
        """
        layout = self.manager.layout
        check_count("num_reqs", num_reqs, 0, layout.max_num_reqs, "max_num_reqs")
        if num_reqs == layout.max_num_reqs and len(groups) == layout.num_groups:
            self._arena.copy_(self._mirror, non_blocking=True)
        else:
            for g in groups:
                self.tables[g].copy_to_gpu(num_reqs)
        self._commit_lengths(num_reqs, groups)

    def batch(self, num_reqs: int) -> torch.Tensor:
        """The rows of a batch: 0 ... num_reqs - 1, int32 on the device."""
        check_count("num_reqs", num_reqs, 0, self.manager.max_num_reqs, "max_num_reqs")
        return self._batch_rows[:num_reqs]

    def tokens(self, rows: Indices, positions: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of a flat list of tokens, int32 and int64 on the device."""
        device = self.manager.device
        return (
            torch.as_tensor(rows).to(device=device, dtype=torch.int32),
            torch.as_tensor(positions).to(device=device, dtype=torch.int64),
        )

    def pad_replayed(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        replay_start: torch.Tensor,
        window: int,
        groups: Sequence[int],
    ) -> None:
        """PAD for replayed tokens in prefix-cacheable groups; without a wait for the device."""
        num_tokens = positions.shape[0]
        if not len(self.batch(num_reqs)) or not num_tokens:
            return
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=positions.device)
        entries = torch.searchsorted(query_start_loc[1 : num_reqs + 1], tokens, right=True)
        in_batch = entries < num_reqs
        starts = replay_start[entries.clamp_(max=num_reqs - 1)].long()
        since = positions - starts
        replayed = in_batch & (starts != 0) & (since >= 0) & (since < window)
        for g in groups:
            slots = self.manager.slot_mappings[g, :num_tokens]
            slots.masked_fill_(replayed & self._cacheable[g], PAD_SLOT_ID)

    def _lengths_of(self, row: int) -> list[int]:
        """Filled columns of a row per group; zeros for a row that the manager will refuse."""
        if not isinstance(row, (int, np.integer)) or not 0 <= row < self.lengths.shape[1]:
            return [0] * len(self.tables)
        lengths: list[int] = self.lengths[:, row].tolist()
        return lengths

    def _fill(self, g: int, row: int, ids: BlockIds, begin: int, old_end: int) -> None:
        table = self.tables[g].np[row]
        end = int(self.lengths[g, row])
        if begin < end:
            parts = self._parts[g]
            table[begin:end] = ids if len(parts) == 1 else split_blocks(ids, parts)
        table[end:old_end] = 0

    def _check_row(self, argument: str, row: int) -> None:
        limit = self.manager.max_num_reqs
        if not isinstance(row, (int, np.integer)) or not 0 <= row < limit:
            raise InvalidArgumentError(
                argument, expected=f"a row in [0, {limit})", actual=repr(row)
            )

    def _commit_lengths(self, num_reqs: int, groups: Sequence[int]) -> None:
        committed = self._committed[:, :num_reqs]
        new = committed.copy()
        new[groups] = self.lengths[groups, :num_reqs]
        if not np.array_equal(new, committed):
            committed[:] = new
            # From pageable memory: the device has its own copy when the call returns.
            device_lengths = self.manager.num_blocks.gpu[:, :num_reqs]
            device_lengths.copy_(torch.from_numpy(new), non_blocking=True)


def split_blocks(block_ids: Sequence[int] | npt.NDArray[Any], parts: npt.NDArray[Any]) -> Any:
    """Kernel block ids k·n, k·n + 1, ... of each allocation block k; `parts` is 0 ... n - 1."""
    return (np.asarray(block_ids)[:, None] * len(parts) + parts).reshape(-1)


def as_slot_mapping_mode(mode: Any) -> SlotMappingMode:
    """This package's mode for its own or vLLM's, which has the same values."""
    return SlotMappingMode(getattr(mode, "value", mode))


def parallel_group(name: str) -> tuple[int, int]:
    """World size and rank in vLLM's "dcp" or "pcp" group; (1, 0) where it is not initialised."""
    distributed = sys.modules.get("vllm.distributed")
    try:
        group = getattr(distributed, f"get_{name}_group")()
    except (AttributeError, AssertionError):
        return 1, 0
    return group.world_size, group.rank_in_group
