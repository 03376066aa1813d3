"""vLLM's v1 block tables on the same manager: all groups' slots in one launch.

`MultiGroupBlockTable` takes the constructor arguments of every release that the plugin knows, by
keyword; positions are those of vllm 0.33. Importable without vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused_slots.block_tables import AscendBlockTables
from fused_slots.faults import ConfigurationError
from fused_slots.groups import SlotMappingMode, get_block_table_width
from fused_slots.layout import per_group
from fused_slots.observe import say_at_exit
from fused_slots.plan import WarmupReport
from fused_slots.vllm.fallback import FallsBack
from fused_slots.vllm.v1_storage import (
    BlockIds,
    Indices,
    Storage,
    as_slot_mapping_mode,
    parallel_group,
)
from fused_slots.vllm.v1_table import BlockTable, RowCalls
from fused_slots.vllm.v1_warmup import register_warmup

__all__ = ["BlockTable", "MultiGroupBlockTable"]


class MultiGroupBlockTable(RowCalls, metaclass=FallsBack):
    """The block tables of all KV cache groups, rows in batch order.

    Args:
        max_num_reqs: rows of every table.
        max_num_batched_tokens: tokens of one step.
        pin_memory: page-lock the host rows.
        device: where slots are computed.
        block_sizes: tokens per allocation block, per group.
        max_num_blocks: allocation blocks of one row, which are aligned to 128 tokens; None = as
            many as hold max_model_len tokens.
        cp_kv_cache_interleave_size: consecutive tokens on one context parallel rank.
        slot_mapping_modes: a `SlotMappingMode` each, this package's or vLLM's.
        kernel_block_sizes: tokens per table column; None = block_sizes.
        max_model_len: tokens of one request. Passed by vllm 0.22 to 0.25, whose alignment leaves
            blocks of more than 128 tokens alone and whose prefill context parallel ranks share
            each group too.
        circular: True = the row is one block used as a ring.
        prefix_cacheable: False = replayed tokens are written.
        replay_window: tokens for which `replay_start` of `compute_slot_mapping` pads.
        slot_dtype: torch.int32 or torch.int64; None = the device's default.

    Raises:
        ConfigurationError, BackendUnavailableError: as `AscendBlockTables`; under the plugin's
            mode `auto` vLLM's own class is built instead.
    """

    table_class: type[BlockTable] = BlockTable
    block_tables: list[BlockTable]

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: str | torch.device,
        block_sizes: Sequence[int],
        max_num_blocks: Sequence[int] | None = None,
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_modes: Sequence[Any] | None = None,
        *,
        kernel_block_sizes: Sequence[int | None] | None = None,
        max_model_len: int | None = None,
        circular: Sequence[bool] | None = None,
        prefix_cacheable: Sequence[bool] | None = None,
        replay_window: int = 0,
        slot_dtype: torch.dtype | None = None,
    ) -> None:
        count = len(block_sizes)
        modes = slot_mapping_modes or [SlotMappingMode.TOKEN_TO_KV_SLOT] * count
        modes = per_group("slot_mapping_modes", modes, count)
        ranks, rank = parallel_group("dcp")
        if max_model_len is not None:
            pcp_ranks, pcp_rank = parallel_group("pcp")
            ranks, rank = pcp_ranks * ranks, pcp_rank * ranks + rank
        if max_num_blocks is None:
            max_num_blocks = blocks_of_a_request(max_model_len, block_sizes, ranks)
        max_num_blocks = per_group("max_num_blocks", max_num_blocks, count)
        rings = per_group("circular", circular or [False] * count, count)
        aligned = _aligned_blocks if max_model_len is None else _aligned_blocks_0_22
        manager = AscendBlockTables(
            block_sizes=block_sizes,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_blocks_per_group=[
                blocks
                if ring or as_slot_mapping_mode(mode) is SlotMappingMode.NONE
                else aligned(blocks, size)
                for blocks, size, mode, ring in zip(
                    max_num_blocks, block_sizes, modes, rings, strict=True
                )
            ],
            device=device,
            cp_size=ranks,
            cp_rank=rank,
            cp_interleave=cp_kv_cache_interleave_size,
            kernel_block_sizes=kernel_block_sizes,  # type: ignore[arg-type]
            slot_mapping_modes=[as_slot_mapping_mode(mode) for mode in modes],
            circular=circular,
            prefix_cacheable=prefix_cacheable,
            replay_window=replay_window,
            slot_dtype=slot_dtype,
        )
        self._build(Storage(manager, pin_memory), modes, pin_memory)

    def _build(self, storage: Storage, modes: Sequence[Any], pin_memory: bool) -> None:
        self._storage = storage
        self._groups = range(len(modes))
        self.block_tables = [
            self.table_class.of_group(storage, g, mode, pin_memory) for g, mode in enumerate(modes)
        ]
        register_warmup(storage.manager)
        say_at_exit(storage.manager)

    @staticmethod
    def as_step(
        query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's tokens in our types, which vLLM's runners use."""
        return query_start_loc, positions

    @property
    def manager(self) -> AscendBlockTables:
        """What maps the slots, and knows the pools."""
        return self._storage.manager

    def append_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Append allocation blocks to a row in every group, for all groups or for none.

        Raises:
            InvalidArgumentError, BlockIdError, RowCapacityError: nothing has changed then.
        """
        self._storage.write_row(row_idx, block_ids, overwrite=False)

    def add_row(self, block_ids: Sequence[BlockIds], row_idx: int) -> None:
        """Start a row anew in every group; what it held beyond its new blocks becomes zero."""
        self._storage.write_row(row_idx, block_ids, overwrite=True)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        positions_compressed_list: Sequence[Indices] | None = None,
        req_indices_compressed_list: Sequence[Indices] | None = None,
        replay_start: torch.Tensor | None = None,
        replay_len: torch.Tensor | None = None,
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
            replay_start: int32 [>= num_reqs], first replayed position; without replay_len, 0 =
                none, and replay_window is how many are.
            replay_len: int32 [>= num_reqs], positions that are replayed from there on.
        """
        if positions_compressed_list and req_indices_compressed_list:
            self.compute_slot_mapping_draft(
                (), (), positions_compressed_list, req_indices_compressed_list
            )
            return
        self.manager.compute_slot_mappings(
            self._storage.batch(num_reqs),
            *self.as_step(query_start_loc, positions),
            self.manager.max_num_batched_tokens,
            replay_start=replay_start,
            replay_len=replay_len,
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
        tokens = self._storage.tokens(req_indices, positions)
        self.manager.map_tokens(*tokens, self.manager.slot_mappings)

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
        self._storage.pad_replayed(num_reqs, query_start_loc, positions, replay_start, window)

    def clear(self) -> None:
        """Zero all tables on host and device; row lengths stay, for a caller who restores them."""
        for table in self.block_tables:
            table.clear()

    def restore_device_memory(self) -> None:
        """Make good every device tensor after its memory came back with arbitrary contents.

        Afterwards all rows are as if just committed, from the host's memory, and all slots PAD.
        What captured graphs and the runner hold stays valid: no address changes.
        """
        self._storage.restore_device_memory()

    def warmup(self) -> WarmupReport:
        """Compile every kernel variant, so that no step compiles any."""
        return self.manager.warmup()

    def __getitem__(self, idx: int) -> BlockTable:
        """The table of KV cache group `idx`."""
        return self.block_tables[idx]


def blocks_of_a_request(
    max_model_len: int | None, block_sizes: Sequence[int], ranks: int
) -> list[int]:
    """Allocation blocks that hold one request on one of its context parallel ranks.

    Raises:
        ConfigurationError: nobody said how long a request is.
    """
    if max_model_len is None:
        raise ConfigurationError(
            "max_num_blocks", expected="a list, or max_model_len to count by", actual="None"
        )
    return [-(-max_model_len // (size * ranks)) for size in block_sizes]


def _aligned_blocks(blocks: int, block_size: int) -> int:
    return get_block_table_width(blocks, block_size)


def _aligned_blocks_0_22(blocks: int, block_size: int) -> int:
    """As vllm 0.22 to 0.25 rounds up: to as many blocks as 128 tokens have room for."""
    fitting = max(128 // block_size, 1)
    return -(-blocks // fitting) * fitting
