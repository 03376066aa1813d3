"""One KV cache group's table as vLLM's v1 runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.block_tables import AscendBlockTables
from fused_slots.groups import SlotMappingMode
from fused_slots.vllm.v1_storage import (
    BlockIds,
    HostDeviceBuffer,
    Indices,
    Storage,
    as_slot_mapping_mode,
    parallel_group,
    split_blocks,
)


class RowCalls:
    """What the runner does to rows, alike in the tables of one group and in those of all."""

    _storage: Storage
    _groups: Sequence[int]
    """Those whose rows it is."""

    def clear_row(self, row_idx: int) -> None:
        """Empty a row, all its columns zero."""
        self._storage.clear_row(row_idx, self._groups)

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row; the vacated one is empty, all its columns zero."""
        self._storage.move_row(src, tgt, self._groups)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        self._storage.swap_row(src, tgt, self._groups)

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy the first rows to the device, as `block_table.np` holds them."""
        self._storage.commit(num_reqs, self._groups)


class BlockTable(RowCalls):
    """One KV cache group's rows: on the host in `block_table.np`, on the device after a commit.

    Args:
        block_size: tokens per allocation block.
        max_num_reqs: rows.
        max_num_blocks_per_req: allocation blocks of one row, taken as given.
        max_num_batched_tokens: tokens of one step.
        pin_memory: page-lock the host rows.
        device: where slots are computed.
        cp_kv_cache_interleave_size: consecutive tokens on one context parallel rank.
        slot_mapping_mode: this package's or vLLM's `SlotMappingMode`.
        kernel_block_size: tokens per table column; None = block_size.

    Raises:
        ConfigurationError, BackendUnavailableError: as `AscendBlockTables`.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: str | torch.device,
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_mode: Any = SlotMappingMode.TOKEN_TO_KV_SLOT,
        *,
        kernel_block_size: int | None = None,
    ) -> None:
        dcp_world_size, dcp_rank = parallel_group("dcp")
        manager = AscendBlockTables(
            block_sizes=[block_size],
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_blocks_per_group=[max_num_blocks_per_req],
            device=device,
            cp_size=dcp_world_size,
            cp_rank=dcp_rank,
            cp_interleave=cp_kv_cache_interleave_size,
            kernel_block_sizes=[block_size if kernel_block_size is None else kernel_block_size],
            slot_mapping_modes=[as_slot_mapping_mode(slot_mapping_mode)],
        )
        self._attach(Storage(manager, pin_memory), 0, slot_mapping_mode, pin_memory)

    @classmethod
    def of_group(
        cls, storage: Storage, g: int, slot_mapping_mode: Any, pin_memory: bool
    ) -> BlockTable:
        """The table of one group among those that share a storage."""
        table = cls.__new__(cls)
        table._attach(storage, g, slot_mapping_mode, pin_memory)
        return table

    def _attach(self, storage: Storage, g: int, slot_mapping_mode: Any, pin_memory: bool) -> None:
        layout = storage.manager.layout
        group = layout.groups[g]
        self._storage, self._group, self._groups = storage, g, (g,)
        self.max_num_reqs = layout.max_num_reqs
        self.max_num_batched_tokens = layout.max_num_batched_tokens
        self.max_num_blocks_per_req = layout.widths[g]
        """Columns of one row."""
        self._maps_slots = group.maps_slots
        self.device = storage.manager.device
        self.pin_memory = pin_memory
        self.kv_cache_block_size = group.block_size
        self.block_size = group.tokens_per_column
        self.blocks_per_kv_block = group.columns_per_block
        self.use_hybrid_blocks = group.columns_per_block > 1
        self.slot_mapping_mode = slot_mapping_mode
        self.cp_kv_cache_interleave_size = layout.context_parallel.interleave
        self.dcp_world_size, self.dcp_rank = parallel_group("dcp")
        self.pcp_world_size, self.pcp_rank = parallel_group("pcp")
        self.block_table: HostDeviceBuffer = storage.tables[g]
        self.slot_mapping: HostDeviceBuffer = storage.slots[g]
        self.num_blocks_per_row: npt.NDArray[np.int32] = storage.lengths[g].view()
        """Filled columns of each row; to read only."""
        self.num_blocks_per_row.flags.writeable = False

    def append_row(self, block_ids: BlockIds, row_idx: int) -> None:
        """Append allocation blocks to a row.

        Raises:
            InvalidArgumentError, BlockIdError, RowCapacityError: nothing has changed then.
        """
        self._storage.write_group_row(self._group, row_idx, block_ids, overwrite=False)

    def add_row(self, block_ids: BlockIds, row_idx: int) -> None:
        """Start a row anew with these blocks; what it held beyond them becomes zero."""
        self._storage.write_group_row(self._group, row_idx, block_ids, overwrite=True)

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Slots of this group's tokens into `slot_mapping.gpu`; see `MultiGroupBlockTable`."""
        if self._maps_slots:
            scratch, rows = self._storage.scratch, self._storage.batch(num_reqs)
            self._storage.manager.compute_slot_mappings(
                rows, query_start_loc, positions, scratch.shape[1], scratch
            )
            self._take(scratch)

    def compute_slot_mapping_draft(self, req_indices: Indices, positions: Indices) -> None:
        """Slots of a flat list of (row, position) pairs into `slot_mapping.gpu`, PAD beyond it.

        Args:
            req_indices: int [T], rows; host or device.
            positions: int [T].
        """
        if self._maps_slots:
            scratch, tokens = self._storage.scratch, self._storage.tokens(req_indices, positions)
            self._storage.manager.map_tokens(*tokens, scratch)
            self._take(scratch)

    def _take(self, scratch: torch.Tensor) -> None:
        """This group's slots of all that were mapped; the others' are not a call's to change."""
        slots = self.slot_mapping.gpu
        slots.copy_(scratch[self._group, : len(slots)])

    def clear(self) -> None:
        """Zero the table on host and device; row lengths stay, for a caller who restores it."""
        self.block_table.gpu.zero_()
        self.block_table.cpu.zero_()

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """int32 [num_reqs, width] on the device."""
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """int32 [max_num_reqs, width] on the host."""
        return self.block_table.cpu

    def get_numpy_array(self) -> npt.NDArray[np.int32]:
        """The same as a NumPy array; what is written into it goes out with the next commit."""
        return self.block_table.np

    @staticmethod
    def map_to_kernel_blocks(
        kv_manager_block_ids: npt.NDArray[Any],
        blocks_per_kv_block: int,
        kernel_block_arange: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """The columns of allocation blocks: k·n ... k·n + n - 1 for each id k.

        Args:
            kv_manager_block_ids: int [B].
            blocks_per_kv_block: n.
            kernel_block_arange: int [1, n] or [n], 0 ... n - 1; made when missing.
        """
        if blocks_per_kv_block == 1:
            return kv_manager_block_ids
        if kernel_block_arange is None:
            kernel_block_arange = np.arange(blocks_per_kv_block)
        return split_blocks(kv_manager_block_ids, kernel_block_arange.reshape(-1))
