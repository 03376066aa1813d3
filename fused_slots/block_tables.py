"""The manager that a model runner owns: every KV cache group's block table, one launch a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused_slots import arguments, env, outputs
from fused_slots.arguments import INDEX_DTYPES, check_count, check_vector
from fused_slots.backends import backend_class, parse_device
from fused_slots.backends.base import Step
from fused_slots.between_steps import BetweenSteps
from fused_slots.faults import ConfigurationError, InvalidArgumentError, require_bool
from fused_slots.group_lists import groups_from_lists
from fused_slots.groups import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.layout import TableLayout, as_tuple, pool_sizes
from fused_slots.row_operations import RowOperations

_INT64 = (torch.int64,)


class AscendBlockTables(RowOperations, BetweenSteps):
    """Block tables and slot mappings of all KV cache groups of a hybrid model.

    Build it from a list of `KVCacheGroup` with `from_groups`, or with the keywords of vLLM's v2
    `BlockTables` as below; both give the same object. Every device buffer keeps its address for
    the manager's life. One thread at a time may use it; with `checked` a second one gets an error.
    Lists below have one entry per KV cache group.

    Args:
        block_sizes: tokens per allocation block.
        max_num_reqs: rows of every table.
        max_num_batched_tokens: tokens of one step, the width of `slot_mappings`.
        max_num_blocks_per_group: allocation blocks of one row; the width is taken as given,
            without alignment.
        device: "cpu", "cuda[:i]", "npu[:i]" or a torch.device.
        cp_size: context parallel ranks.
        cp_rank: this rank.
        cp_interleave: consecutive tokens on one rank.
        slot_mapping_enabled: False = all slots of the group are PAD. Default: True.
        dcp_sharded: False = the group is replicated on every rank. Default: True, False for a ring.
        sliding_window_reach: tokens below the first scheduled position that attention may still
            read; 0 = all. Default: 0.
        kernel_block_sizes: tokens per table column. Default: block_sizes.
        slot_mapping_modes: a `SlotMappingMode` each; a disabled group is NONE whatever stands here.
        circular: True = the row is one block used as a ring. Default: False.
        prefix_cacheable: False = replayed tokens are written. Default: True, False for a ring.
        replay_window: tokens after `replay_start` that cacheable groups do not rewrite.
        slot_dtype: torch.int32 or torch.int64. Default: int32 on npu, int64 elsewhere.
        num_blocks: pool size in allocation blocks, an int or a list; ids at or above it are
            refused. None = unknown.
        checked: record the first device faults in detail. None = FUSED_SLOTS_CHECKED.
        null_block_id: an allocation block that is never written: its tokens become PAD and a
            counted fault. None = FUSED_SLOTS_NULL_BLOCK, and where that is unset there is none.
        pools: groups with one name here take their block ids from one pool. Default: "", its own.

    Raises:
        ConfigurationError: a setting that cannot be mapped exactly; names it and what would do.
        BackendUnavailableError: the device, its driver or its package is missing.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        device: str | torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: Sequence[bool] | None = None,
        dcp_sharded: Sequence[bool] | None = None,
        sliding_window_reach: Sequence[int] | None = None,
        kernel_block_sizes: Sequence[int] | None = None,
        slot_mapping_modes: Sequence[SlotMappingMode] | None = None,
        circular: Sequence[bool] | None = None,
        prefix_cacheable: Sequence[bool] | None = None,
        replay_window: int = 0,
        slot_dtype: torch.dtype | None = None,
        num_blocks: int | Sequence[int] | None = None,
        checked: bool | None = None,
        null_block_id: int | None = None,
        pools: Sequence[str] | None = None,
    ) -> None:
        groups = groups_from_lists(
            block_sizes,
            max_num_blocks_per_group,
            slot_mapping_enabled=slot_mapping_enabled,
            dcp_sharded=dcp_sharded,
            sliding_window_reach=sliding_window_reach,
            kernel_block_sizes=kernel_block_sizes,
            slot_mapping_modes=slot_mapping_modes,
            circular=circular,
            prefix_cacheable=prefix_cacheable,
            pools=pools,
        )
        self._build(
            groups,
            [group.max_num_blocks * group.columns_per_block for group in groups],
            device,
            slot_dtype,
            num_blocks,
            checked,
            null_block_id,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            context_parallel=ContextParallel(cp_size, cp_rank, cp_interleave),
            replay_window=replay_window,
        )

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[KVCacheGroup],
        *,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        device: str | torch.device = "cpu",
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen, no state
        replay_window: int = 0,
        slot_dtype: torch.dtype | None = None,
        num_blocks: int | Sequence[int | None] | None = None,
        checked: bool | None = None,
        null_block_id: int | None = None,
    ) -> AscendBlockTables:
        """Build a manager from its groups; rows get the width of `get_block_table_width`.

        The arguments and errors are those of the class, with `context_parallel` in place of the
        three numbers of context parallelism.
        """
        groups = as_tuple("groups", groups)
        for g, group in enumerate(groups):
            if not isinstance(group, KVCacheGroup):
                raise ConfigurationError(
                    f"groups[{g}]", expected="a fused_slots.KVCacheGroup", actual=repr(group)
                )
        tables = cls.__new__(cls)
        tables._build(
            groups,
            [group.row_width for group in groups],
            device,
            slot_dtype,
            num_blocks,
            checked,
            null_block_id,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            context_parallel=context_parallel,
            replay_window=replay_window,
        )
        return tables

    def _build(
        self,
        groups: Sequence[KVCacheGroup],
        widths: Sequence[int],
        device: str | torch.device,
        slot_dtype: torch.dtype | None,
        num_blocks: int | Sequence[int | None] | None,
        checked: bool | None,
        null_block_id: int | None,
        **settings: Any,
    ) -> None:
        """Both constructors' common end; `settings` go into the layout as they are."""
        torch_device = parse_device(device)
        backend = backend_class(torch_device)
        checked = env.checked() if checked is None else require_bool("checked", checked)
        layout = TableLayout(
            groups=tuple(groups),
            widths=tuple(widths),
            slot_dtype=backend.default_slot_dtype if slot_dtype is None else slot_dtype,
            num_blocks=pool_sizes(num_blocks, len(groups)),
            null_block_id=env.null_block_id() if null_block_id is None else null_block_id,
            **settings,
        )
        self._assemble(layout, backend, torch_device, checked)

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: Sequence[torch.Tensor] | None = None,
        out_ptrs: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Copy the rows of a batch into the gathered tables.

        Args:
            idx_mapping: int32 or int64 [num_reqs], the row of each batch entry, -1 = dummy.
            num_reqs_padded: rows to return; those from num_reqs on are zero.
            out: per group int32 [>= num_reqs_padded, >= width], written instead of
                `input_block_tables`; rows from num_reqs_padded on stay as they are.
            out_ptrs: uint64 [G], the addresses of `out`, as vLLM passes them; `out` suffices.
            num_computed_tokens: int32 [max_num_reqs], by row. In groups with a
                sliding_window_reach, columns wholly below the window become the null block 0.

        Returns:
            Per group an int32 [num_reqs_padded, width] view: the row's filled columns, zero
            beyond them.

        Raises:
            InvalidArgumentError: a tensor has the wrong shape, dtype or device.
        """
        num_reqs = check_vector("idx_mapping", idx_mapping, INDEX_DTYPES, self.device)
        if out is not None:
            outputs.check_tables_out(self.layout, self.device, out)
        elif out_ptrs is not None:
            raise InvalidArgumentError("out", expected="the tables out_ptrs names", actual="None")
        num_reqs_padded = arguments.check_gather(
            self.layout, self.device, num_reqs, num_reqs_padded, out, num_computed_tokens
        )
        if out is not None and outputs.is_own_table_list(self._backend, out):
            out = None
        if num_reqs or num_reqs_padded or out is None:
            self._launch(
                Step(
                    idx_mapping,
                    num_reqs_padded=num_reqs_padded,
                    num_computed_tokens=num_computed_tokens,
                    tables_out=out,
                )
            )
        elif self._waiting:
            self._carry_out()
        if out is None:
            return self._gathered(num_reqs_padded)
        return tuple(table[:num_reqs_padded] for table in out)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
        replay_start: torch.Tensor | None = None,
        replay_len: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots of every token of a batch in every group, in one launch.

        The number of tokens is N = query_start_loc[num_reqs]; whatever the arrays hold beyond it
        is not read, and slots from N to the capacity become PAD.

        Args:
            idx_mapping: int32 or int64 [num_reqs], the row of each batch entry, -1 = dummy.
            query_start_loc: int32 [>= num_reqs + 1], token offsets, starting at 0.
            positions: int64 [>= N], logical position of each token in its request.
            num_tokens_padded: columns to return, at least N.
            out: int32 or int64 [G, capacity], written instead of `slot_mappings`.
            replay_start: int32 [>= num_reqs], by batch entry: first replayed position. Without
                replay_len the manager's replay_window follows from there, and 0 = none.
            replay_len: int32 [>= num_reqs], by batch entry: replayed positions, <= 0 = none.

        Returns:
            [G, num_tokens_padded] view of `slot_mappings` or `out`.

        Raises:
            InvalidArgumentError: a tensor has the wrong shape, dtype or device, or (where the
                host can see it) query_start_loc decreases or exceeds the capacity or the view.
        """
        if out is not None:
            outputs.check_slots_out(self._backend, self.device, out, self._rows.largest_ids)
        capacity = self.layout.max_num_batched_tokens if out is None else out.shape[1]
        num_reqs = check_vector("idx_mapping", idx_mapping, INDEX_DTYPES, self.device)
        num_tokens_padded = check_count(
            "num_tokens_padded", num_tokens_padded, 0, capacity, "the capacity"
        )
        step = Step(
            idx_mapping,
            query_start_loc,
            positions,
            num_tokens_padded=num_tokens_padded,
            replay_start=replay_start,
            replay_len=replay_len,
            slots_out=out,
        )
        self._check_tokens(num_reqs, step, capacity)
        self._launch_map(step)
        return self._mapped(num_tokens_padded) if out is None else out[:, :num_tokens_padded]

    def step(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        replay_start: torch.Tensor | None = None,
        replay_len: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Apply staged writes, gather the batch's rows and map its slots, in one launch.

        Arguments and errors are those of `gather_block_tables` and `compute_slot_mappings`;
        num_reqs_padded defaults to num_reqs, num_tokens_padded to the capacity.

        Returns:
            The gathered tables and the slot mappings, as the two calls return them.

        Raises:
            InvalidArgumentError: as those two; or writes are pending during a graph capture.
        """
        num_reqs = check_vector("idx_mapping", idx_mapping, INDEX_DTYPES, self.device)
        if num_reqs_padded is None:
            num_reqs_padded = num_reqs
        capacity = self.layout.max_num_batched_tokens
        if num_tokens_padded is None:
            num_tokens_padded = capacity
        num_reqs_padded = arguments.check_gather(
            self.layout, self.device, num_reqs, num_reqs_padded, None, num_computed_tokens
        )
        num_tokens_padded = check_count(
            "num_tokens_padded", num_tokens_padded, 0, capacity, "max_num_batched_tokens"
        )
        step = Step(
            idx_mapping,
            query_start_loc,
            positions,
            num_reqs_padded,
            num_tokens_padded,
            num_computed_tokens,
            replay_start,
            replay_len,
            self._staged("step"),
        )
        self._check_tokens(num_reqs, step, capacity)
        self._launch(step)
        return self._gathered(num_reqs_padded), self._mapped(num_tokens_padded)

    def map_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Slots of a flat list of (row, position) pairs, for drafts, in one launch.

        The rules are those of `compute_slot_mappings` without replay; `slot_mappings` is left
        alone, and what lies beyond T in the buffer becomes PAD.

        Args:
            rows: int32 or int64 [T], the row of each token, -1 = dummy.
            positions: int64 [T].
            out: int32 or int64 [G, >= T], written instead of the manager's own draft buffer.

        Returns:
            [G, T] view of the draft buffer or `out`.

        Raises:
            InvalidArgumentError: a tensor has the wrong shape, dtype or device.
        """
        slots = self._backend.draft_slot_mappings if out is None else out
        if out is not None:
            outputs.check_slots_out(self._backend, self.device, out, self._rows.largest_ids)
        num_tokens = check_vector("rows", rows, INDEX_DTYPES, self.device)
        check_vector("positions", positions, _INT64, self.device)
        if positions.shape[0] != num_tokens:
            raise InvalidArgumentError(
                "positions", expected=f"{num_tokens} entries, as rows", actual=f"{len(positions)}"
            )
        setting = "max_num_batched_tokens, or the width of out"
        check_count("tokens in rows", num_tokens, 0, slots.shape[1], setting)
        if self._waiting:
            self._carry_out()
        if self.layout.num_groups:
            self._backend.map_tokens(rows, positions, slots)
            self.launches += 1
        return slots[:, :num_tokens]

    def _check_tokens(self, num_reqs: int, step: Step, capacity: int) -> None:
        """Check what a step says about tokens, as far as the host sees it."""
        arguments.check_tokens(self.device, num_reqs, step)
        if self._backend.reads_tensors_on_host:
            arguments.check_host_visible_batch(num_reqs, step, capacity)
