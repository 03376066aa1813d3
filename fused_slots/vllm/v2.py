"""The classes that stand in for vLLM's v2 `BlockTables` and for vllm-ascend's subclass of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused_slots import env
from fused_slots.observe import say_at_exit
from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.fallback import FallsBack


class FusedBlockTables(DeferringBlockTables, metaclass=FallsBack):
    """The manager as vLLM's v2 runner builds it; the arguments of 0.33.0 come first, in its order.

    The plugin passes those of every release by name. Kernels are compiled at construction,
    unless FUSED_SLOTS_WARMUP=0, because vLLM does not call `warmup`.

    Raises:
        ConfigurationError: a setting that cannot be mapped exactly.
        BackendUnavailableError: no backend serves the device.
        Under the plugin's mode `auto` neither is raised: vLLM's own class is built instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM passes no replay_len; should a caller do so, it compiles on that call.
        self._backend.warms_replay = self.layout.replay_window > 0
        say_at_exit(self)
        if env.WARMUP.read() == "1":
            self.warmup()
        else:
            self._backend.try_launch()

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: Sequence[torch.Tensor] | None = None,
        out_ptrs: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if out is None and not self._fusing and self._backend.is_capturing():
            # vLLM's forward benchmark restores the gathered tables inside the graph it captures.
            self.invalidate_gathered()
        return super().gather_block_tables(
            idx_mapping, num_reqs_padded, out, out_ptrs, num_computed_tokens
        )

    # What vLLM 0.26 to 0.31 reads of its own class.

    @property
    def kernel_block_sizes(self) -> list[int]:
        """Tokens per table column of every group."""
        return [group.block_size // group.columns_per_block for group in self.layout.groups]

    @property
    def blocks_per_kv_block(self) -> list[int]:
        """Columns per allocation block of every group."""
        return [group.columns_per_block for group in self.layout.groups]


class FusedAscendBlockTables(FusedBlockTables):
    """The same for vllm-ascend's v2 runner: kernel_block_sizes follows device, slots are int32."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        kernel_block_sizes: list[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            block_sizes,
            max_num_reqs,
            max_num_batched_tokens,
            max_num_blocks_per_group,
            device,
            *args,
            kernel_block_sizes=kernel_block_sizes,
            slot_dtype=torch.int32,
            **kwargs,
        )
