"""vLLM's v1 block tables on the same manager: all groups' slots in one launch.

`MultiGroupBlockTable` and `BlockTable` take the constructor arguments of vllm 0.33.0; where other
releases pass `kernel_block_sizes` (`kernel_block_size`), it is taken by keyword. Importable
without vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused_slots.block_tables import AscendBlockTables
from fused_slots.groups import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.layout import per_group
from fused_slots.plan import WarmupReport
from fused_slots.vllm.fallback import FallsBack
from fused_slots.vllm.v1_storage import (
    BlockIds,
    Indices,
    Storage,
    as_slot_mapping_mode,
    parallel_group,
)
from fused_slots.vllm.v1_table import BlockTable
from fused_slots.vllm.v1_warmup import register_warmup

__all__ = ["BlockTable", "MultiGroupBlockTable"]


class MultiGroupBlockTable(metaclass=FallsBack):
    """The block tables of all KV cache groups, rows in batch order.

    Args:
        max_num_reqs: rows of every table.
        max_num_batched_tokens: tokens of one step.
        pin_memory: page-lock the host rows.
        device: where slots are computed.
        block_sizes: tokens per allocation block, per group.
        max_num_blocks: allocation blocks of one row; rows get `get_block_table_width`.
        cp_kv_cache_interleave_size: consecutive tokens on one context parallel rank.
        slot_mapping_modes: this package's or vLLM's `SlotMappingMode`s.
        kernel_block_sizes: tokens per table column; None = block_sizes.
        circular: True = the row is one block used as a ring.
        prefix_cacheable: False = replayed tokens are written.
        replay_window: tokens for which `replay_start` of `compute_slot_mapping` pads.
        slot_dtype: torch.int32 or torch.int64; None = the device's default.

    Raises:
        ConfigurationError, BackendUnavailableError: as `AscendBlockTables`; under the plugin's
            mode `auto` vLLM's own class is built instead.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: str | torch.device,
        block_sizes: Sequence[int],
        max_num_blocks: Sequence[int],
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_modes: Sequence[Any] | None = None,
        *,
        kernel_block_sizes: Sequence[int | None] | None = None,
        circular: Sequence[bool] | None = None,
        prefix_cacheable: Sequence[bool] | None = None,
        replay_window: int = 0,
        slot_dtype: torch.dtype | None = None,
    ) -> None:
        count = len(block_sizes)
        modes = slot_mapping_modes or [SlotMappingMode.TOKEN_TO_KV_SLOT] * count
        columns: dict[str, Sequence[Any]] = {
            "max_num_blocks": max_num_blocks,
            "kernel_block_sizes": kernel_block_sizes or [None] * count,
            "slot_mapping_modes": modes,
            "circular": circular or [False] * count,
            "prefix_cacheable": prefix_cacheable or [True] * count,
        }
        lists = [per_group(name, values, count) for name, values in columns.items()]
        dcp_world_size, dcp_rank = parallel_group("dcp")
        manager = AscendBlockTables.from_groups(
            [
                KVCacheGroup(
                    block_size=block_size,
                    max_num_blocks=blocks,
                    kernel_block_size=kernel_size,
                    slot_mapping_mode=as_slot_mapping_mode(mode),
                    circular=ring,
                    prefix_cacheable=cacheable,
                )
                for block_size, blocks, kernel_size, mode, ring, cacheable in zip(
                    block_sizes, *lists, strict=True
                )
            ],
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            device=device,
            context_parallel=ContextParallel(dcp_world_size, dcp_rank, cp_kv_cache_interleave_size),
            replay_window=replay_window,
            slot_dtype=slot_dtype,
        )
        self._storage = Storage(manager, pin_memory)
        self._all = range(count)
        self.block_tables = [
            BlockTable.of_group(self._storage, g, mode, pin_memory) for g, mode in enumerate(modes)
        ]
        register_warmup(manager)

    def append_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Append allocation blocks to a row in every group, for all groups or for none.

        Raises:
            InvalidArgumentError, BlockIdError, RowCapacityError: nothing has changed then.
        """
        self._storage.write_row(row_idx, block_ids, overwrite=False)

    def add_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Start a row anew in every group; what it held beyond its new blocks becomes zero."""
        self._storage.write_row(row_idx, block_ids, overwrite=True)

    def clear_row(self, row_idx: int) -> None:
        """Empty a row in every group, all its columns zero."""
        self._storage.clear_row(row_idx, self._all)

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row; the vacated one is empty, all its columns zero."""
        self._storage.move_row(src, tgt, self._all)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        self._storage.swap_row(src, tgt, self._all)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        positions_compressed_list: Sequence[Indices] | None = None,
        req_indices_compressed_list: Sequence[Indices] | None = None,
        replay_start: torch.Tensor | None = None,
    ) -> None:
        """Slots of all groups' tokens into their `slot_mapping.gpu`, in one launch.

        Reads the rows that were committed. Slots beyond the last token become PAD, and so do
        those of a group without slots.

        Args:
            num_reqs: batch entries; entry b is row b.
            query_start_loc: int32 [>= num_reqs + 1].
            positions: int64 [>= query_start_loc[num_reqs]].
            positions_compressed_list, req_indices_compressed_list: per group a flat list of its
                own, mapped as `compute_slot_mapping_draft` does.
            replay_start: int32 [>= num_reqs], first replayed position, 0 = none; needs
                replay_window.
        """
        if positions_compressed_list and req_indices_compressed_list:
            self.compute_slot_mapping_draft(
                (), (), positions_compressed_list, req_indices_compressed_list
            )
            return
        rows = self._storage.batch(num_reqs)
        self._storage.manager.compute_slot_mappings(
            rows, query_start_loc, positions, 0, replay_start=replay_start
        )

    def compute_slot_mapping_draft(
        self,
        req_indices: Any,
        positions: Any,
        positions_compressed_list: Sequence[Indices] | None = None,
        req_indices_compressed_list: Sequence[Indices] | None = None,
    ) -> None:
        """Slots of a flat list of (row, position) pairs, for drafts; PAD beyond it.

        One launch for all groups, or one per group where each has a list of its own.

        Args:
            req_indices: int [T], rows; host or device.
            positions: int [T].
            positions_compressed_list, req_indices_compressed_list: per group, instead of those.
        """
        if positions_compressed_list and req_indices_compressed_list:
            lists = zip(req_indices_compressed_list, positions_compressed_list, strict=True)
            for table, (group_rows, group_positions) in zip(self.block_tables, lists, strict=True):
                table.compute_slot_mapping_draft(group_rows, group_positions)
            return
        manager = self._storage.manager
        rows, token_positions = self._storage.tokens(req_indices, positions)
        manager.map_tokens(rows, token_positions, manager.slot_mappings)

    def pad_replayed_slots(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        replay_start: torch.Tensor,
        window: int,
    ) -> None:
        """PAD for the replayed tokens of prefix-cacheable groups, after `compute_slot_mapping`.

        Args:
            num_reqs, query_start_loc, positions: as there.
            replay_start: int32 [>= num_reqs], first replayed position, 0 = none.
            window: positions from there on that are replayed.
        """
        self._storage.pad_replayed(
            num_reqs, query_start_loc, positions, replay_start, window, self._all
        )

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy the first rows of every group to the device, as `block_table.np` holds them."""
        self._storage.commit(num_reqs, self._all)

    def clear(self) -> None:
        """Zero all tables on host and device; row lengths stay, for a caller who restores them."""
        for table in self.block_tables:
            table.clear()

    def warmup(self) -> WarmupReport:
        """Compile every kernel variant, so that no step compiles any."""
        return self._storage.manager.warmup()

    def __getitem__(self, idx: int) -> BlockTable:
        """The table of KV cache group `idx`."""
        return self.block_tables[idx]
