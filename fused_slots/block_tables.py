"""The manager that a model runner owns: every KV cache group's block table, one launch a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fused_slots import arguments, env
from fused_slots.arguments import INDEX_DTYPES, check_count, check_vector
from fused_slots.backends import backend_class, parse_device
from fused_slots.backends.base import Step
from fused_slots.faults import ConfigurationError, Fault, InvalidArgumentError, require_bool
from fused_slots.group_lists import groups_from_lists
from fused_slots.groups import PAD_SLOT_ID, ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout, as_tuple, per_group
from fused_slots.plan import LaunchPlan, WarmupReport

if TYPE_CHECKING:
    from fused_slots.inspect.explain import Explanation

_INT64 = (torch.int64,)

CACHED_VIEWS = 64
"""Numbers of rows, and of tokens, for which views of the results are kept."""


@dataclass(frozen=True)
class BlockTable:
    """One group's source table: `gpu` is int32 [max_num_reqs, width] on the manager's device."""

    gpu: torch.Tensor


@dataclass(frozen=True)
class NumBlocks:
    """Filled columns per row, int32 [G, max_num_reqs].

    `np` is the host's truth, staged appends included; `gpu` is the device's copy, which follows
    when staged writes are applied.
    """

    np: npt.NDArray[np.int32]
    gpu: torch.Tensor


class AscendBlockTables:
    """Block tables and slot mappings of all KV cache groups of a hybrid model.

    Build it from `KVCacheGroup`s with `from_groups`, or with the keywords of vLLM's v2
    `BlockTables` as below; both give the same object. Every device buffer keeps its address for
    the manager's life. `arguments` below have one entry per KV cache group where they are lists.

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
        dcp_sharded: False = the group is replicated on every rank. Default: True.
        sliding_window_reach: tokens below the first scheduled position that attention may still
            read; 0 = all. Default: 0.
        kernel_block_sizes: tokens per table column. Default: block_sizes.
        slot_mapping_modes: `SlotMappingMode`s; a disabled group is NONE whatever stands here.
        circular: True = the row is one block used as a ring. Default: False.
        prefix_cacheable: False = replayed tokens are written. Default: True.
        replay_window: tokens after `replay_start` that cacheable groups do not rewrite.
        slot_dtype: torch.int32 or torch.int64. Default: int32 on npu, int64 elsewhere.
        num_blocks: pool size in allocation blocks, an int or a list; ids at or above it are
            refused. None = unknown.
        checked: record the first device faults in detail. None = FUSED_SLOTS_CHECKED.

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
        )
        self._build(
            groups,
            [group.max_num_blocks * group.columns_per_block for group in groups],
            max_num_reqs,
            max_num_batched_tokens,
            device,
            ContextParallel(cp_size, cp_rank, cp_interleave),
            replay_window,
            slot_dtype,
            num_blocks,
            checked,
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
    ) -> AscendBlockTables:
        """Build a manager from its groups; rows get the width of `get_block_table_width`.

        The arguments and errors are those of the class, with `context_parallel` in place of the
        three cp_ numbers.
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
            max_num_reqs,
            max_num_batched_tokens,
            device,
            context_parallel,
            replay_window,
            slot_dtype,
            num_blocks,
            checked,
        )
        return tables

    def _build(
        self,
        groups: Sequence[KVCacheGroup],
        widths: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        device: str | torch.device,
        context_parallel: ContextParallel,
        replay_window: int,
        slot_dtype: torch.dtype | None,
        num_blocks: int | Sequence[int | None] | None,
        checked: bool | None,
    ) -> None:
        torch_device = parse_device(device)
        backend = backend_class(torch_device)
        if num_blocks is None or isinstance(num_blocks, (int, np.integer)):
            num_blocks = [num_blocks] * len(groups)
        checked = env.checked() if checked is None else require_bool("checked", checked)
        self.layout = TableLayout(
            groups=tuple(groups),
            widths=tuple(widths),
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            context_parallel=context_parallel,
            replay_window=replay_window,
            slot_dtype=backend.default_slot_dtype if slot_dtype is None else slot_dtype,
            num_blocks=per_group("num_blocks", num_blocks, len(groups)),
        )
        self.redirect_writes_to_null_block = False
        """Writable: while true, every staged block id becomes the null block (vLLM sets it)."""
        self.launches = 0
        """Operations started on the device since construction; graph replays do not count."""
        with _naming_sizes(self.layout, torch_device):
            self._rows = HostRows(self.layout)
            self._backend = backend(self.layout, torch_device, checked)
        # As tensors name it: "cuda" holds them on "cuda:0", "cpu:0" on "cpu".
        self.device = self._backend.slot_mappings.device
        self.block_tables = [BlockTable(table) for table in self._backend.tables]
        self.input_block_tables = list(self._backend.input_tables)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._slot_views: dict[int, torch.Tensor] = {}
        self.num_blocks = NumBlocks(self._rows.num_columns, self._backend.num_columns)
        self.slot_mappings = self._backend.slot_mappings

    # What vLLM reads of its own class, under its names.

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per allocation block of every group."""
        return [group.block_size for group in self.layout.groups]

    @property
    def num_kv_cache_groups(self) -> int:
        """Number of KV cache groups (G)."""
        return self.layout.num_groups

    @property
    def max_num_reqs(self) -> int:
        """Rows of every table."""
        return self.layout.max_num_reqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step; the width of `slot_mappings`."""
        return self.layout.max_num_batched_tokens

    @property
    def cp_size(self) -> int:
        """Context parallel ranks."""
        return self.layout.context_parallel.size

    @property
    def cp_rank(self) -> int:
        """This context parallel rank."""
        return self.layout.context_parallel.rank

    @property
    def cp_interleave(self) -> int:
        """Consecutive tokens on one context parallel rank."""
        return self.layout.context_parallel.interleave

    def append_block_ids(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
    ) -> None:
        """Stage one request's new blocks; the device sees them after `apply_staged_writes`.

        All or nothing: after an error no group's row has changed.

        Args:
            req_index: the request's row.
            new_block_ids: per group, a list of allocation block ids. Under kernel splitting each
                id k becomes the columns k*n ... k*n + n - 1.
            overwrite: start the row anew with these blocks instead of appending them.

        Raises:
            InvalidArgumentError: no such row, or not one list per group.
            BlockIdError: an id is negative, outside the pool, or has slots beyond slot_dtype.
            RowCapacityError: the row has too few columns; names request, group and the numbers.
        """
        self._rows.stage(req_index, new_block_ids, overwrite, self.redirect_writes_to_null_block)

    def apply_staged_writes(self) -> None:
        """Make the staged writes visible on the device: one launch, none if nothing is staged.

        Raises:
            InvalidArgumentError: writes are pending while a graph is being captured.
        """
        staged = self._staged("apply_staged_writes")
        if staged is not None:
            self._backend.step(Step(staged=staged))
            self.launches += 1
            staged.clear()

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
        num_reqs, num_reqs_padded = self._check_gather(
            idx_mapping, num_reqs_padded, out, out_ptrs, num_computed_tokens
        )
        if out is not None and self._is_own_memory(out):
            out = None
        if self.layout.num_groups and (num_reqs or num_reqs_padded or out is None):
            staged = self._staged_for_gather()
            self._backend.step(
                Step(
                    idx_mapping,
                    num_reqs_padded=num_reqs_padded,
                    num_computed_tokens=num_computed_tokens,
                    staged=staged,
                    tables_out=out,
                )
            )
            self.launches += 1
            if staged is not None:
                staged.clear()
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
    ) -> torch.Tensor:
        """Slots of every token of a batch in every group, in one launch.

        The number of tokens is N = query_start_loc[num_reqs]; whatever the arrays hold beyond it
        is not read, and slots from N to the capacity become PAD.

        Args:
            idx_mapping: int32 or int64 [num_reqs], the row of each batch entry, -1 = dummy.
            query_start_loc: int32 [>= num_reqs + 1], token offsets, starting at 0.
            positions: int64 [>= N], logical position of each token in its request.
            num_tokens_padded: columns to return.
            out: int32 or int64 [G, capacity], written instead of `slot_mappings`.
            replay_start: int32 [>= num_reqs], by batch entry: first replayed position, 0 = none.

        Returns:
            [G, num_tokens_padded] view of `slot_mappings` or `out`.

        Raises:
            InvalidArgumentError: a tensor has the wrong shape, dtype or device, or (where the
                host can see it) query_start_loc decreases or exceeds the capacity.
        """
        if out is not None:
            self._check_slots_out(out)
        capacity = self.layout.max_num_batched_tokens if out is None else out.shape[1]
        num_reqs = arguments.check_rows(self.device, idx_mapping)
        self._check_tokens(num_reqs, query_start_loc, positions, replay_start, capacity)
        num_tokens_padded = check_count(
            "num_tokens_padded", num_tokens_padded, 0, capacity, "the capacity"
        )
        if self.layout.num_groups:
            self._backend.map_slots(
                Step(
                    idx_mapping,
                    query_start_loc,
                    positions,
                    num_tokens_padded=num_tokens_padded,
                    replay_start=replay_start,
                    slots_out=out,
                )
            )
            self.launches += 1
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
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Apply staged writes, gather the batch's rows and map its slots, in one launch.

        Arguments and errors are those of `gather_block_tables` and `compute_slot_mappings`;
        num_reqs_padded defaults to num_reqs, num_tokens_padded to the capacity.

        Returns:
            The gathered tables and the slot mappings, as the two calls return them.

        Raises:
            InvalidArgumentError: as those two; or writes are pending during a graph capture.
        """
        num_reqs = arguments.check_rows(self.device, idx_mapping)
        if num_reqs_padded is None:
            num_reqs_padded = num_reqs
        capacity = self.layout.max_num_batched_tokens
        if num_tokens_padded is None:
            num_tokens_padded = capacity
        num_reqs_padded = arguments.check_gather(
            self.layout, self.device, num_reqs, num_reqs_padded, None, num_computed_tokens
        )
        self._check_tokens(num_reqs, query_start_loc, positions, replay_start, capacity)
        num_tokens_padded = check_count(
            "num_tokens_padded", num_tokens_padded, 0, capacity, "max_num_batched_tokens"
        )
        staged = self._staged("step")
        if self.layout.num_groups:
            self._backend.step(
                Step(
                    idx_mapping,
                    query_start_loc,
                    positions,
                    num_reqs_padded,
                    num_tokens_padded,
                    num_computed_tokens,
                    replay_start,
                    staged=staged,
                )
            )
            self.launches += 1
        if staged is not None:
            staged.clear()
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
            self._check_slots_out(out)
        num_tokens = check_vector("rows", rows, INDEX_DTYPES, self.device)
        check_vector("positions", positions, _INT64, self.device)
        if positions.shape[0] != num_tokens:
            raise InvalidArgumentError(
                "positions", expected=f"{num_tokens} entries, as rows", actual=f"{len(positions)}"
            )
        setting = "max_num_batched_tokens, or the width of out"
        check_count("tokens in rows", num_tokens, 0, slots.shape[1], setting)
        if self.layout.num_groups:
            self._backend.map_tokens(rows, positions, slots)
            self.launches += 1
        return slots[:, :num_tokens]

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Zeroed gathered tables for a dummy run; the caller may write into them.

        Args:
            num_reqs: rows to return.

        Returns:
            Per group an int32 [num_reqs, width] view of `input_block_tables`.

        Raises:
            InvalidArgumentError: more rows than max_num_reqs.
        """
        num_reqs = check_count("num_reqs", num_reqs, 0, self.layout.max_num_reqs, "max_num_reqs")
        self._backend.clear_input_tables(num_reqs)
        return self._gathered(num_reqs)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """The slot mappings, PAD everywhere, for a dummy run.

        Args:
            num_tokens: columns to return.

        Returns:
            [G, num_tokens] view of `slot_mappings`, whose whole buffer is PAD.

        Raises:
            InvalidArgumentError: more tokens than max_num_batched_tokens.
        """
        capacity = self.layout.max_num_batched_tokens
        num_tokens = check_count("num_tokens", num_tokens, 0, capacity, "max_num_batched_tokens")
        self.slot_mappings.fill_(PAD_SLOT_ID)
        return self._mapped(num_tokens)

    def init_block_table_layout_tensors(self) -> None:
        """Rebuild device metadata after the device's memory was restored; harmless at any time."""
        self._backend.init_layout()

    def warmup(self) -> WarmupReport:
        """Compile every kernel variant that a plan can choose, so that no step compiles any."""
        return self._backend.warmup()

    def launch_plan(
        self, num_reqs: int, num_tokens: int, max_query_len: int | None = None
    ) -> LaunchPlan:
        """How a batch of these sizes would be launched.

        Args:
            num_reqs: batch entries.
            num_tokens: tokens of the batch.
            max_query_len: longest query, if known.

        Raises:
            InvalidArgumentError: a size exceeds the manager's.
        """
        num_reqs = check_count("num_reqs", num_reqs, 0, self.layout.max_num_reqs, "max_num_reqs")
        capacity = self.layout.max_num_batched_tokens
        num_tokens = check_count("num_tokens", num_tokens, 0, capacity, "max_num_batched_tokens")
        if max_query_len is not None:
            max_query_len = check_count(
                "max_query_len", max_query_len, 0, capacity, "max_num_batched_tokens"
            )
        return self._backend.launch_plan(num_reqs, num_tokens, max_query_len)

    def take_faults(self) -> list[Fault]:
        """Wait for the device and return the faults counted since the last call.

        Unchecked: one record per (code, group). Checked: the first ones one by one, then one
        record per (code, group) for the rest.
        """
        return self._backend.take_faults()

    def explain(
        self, group: int, req_index: int, position: int, replay_start: int = 0
    ) -> Explanation:
        """Derive one token's slot, number by number; str() of the result is the derivation.

        Reads the row from the device, so it waits for it. Staged writes that were not applied are
        not seen.

        Args:
            group: KV cache group.
            req_index: the request's row, -1 = dummy.
            position: logical position of the token.
            replay_start: first replayed position of the request, 0 = none.

        Raises:
            InvalidArgumentError: no such group or row.
        """
        from fused_slots.inspect.explain import explain

        return explain(self, group, req_index, position, replay_start)

    def check_integrity(self) -> None:
        """Check every invariant that can be read off the buffers; waits for the device.

        Raises:
            IntegrityError: lists each broken invariant.
        """
        from fused_slots.inspect.check import check_integrity

        check_integrity(self)

    def _is_own_memory(self, out: Sequence[torch.Tensor]) -> bool:
        """Whether `out` is `input_block_tables`, whose contents are tracked from call to call.

        Raises:
            InvalidArgumentError: it is a part of the manager's memory, written behind its back.
        """
        own = self.input_block_tables
        if out and all(a.data_ptr() == b.data_ptr() for a, b in zip(out, own, strict=True)):
            return True
        arenas = [self._backend.arena, self._backend.input_arena]
        storages = [arena.untyped_storage().data_ptr() for arena in arenas]
        for g, table in enumerate(out):
            if table.untyped_storage().data_ptr() in storages:
                raise InvalidArgumentError(
                    f"out[{g}]",
                    expected="memory outside the manager, or input_block_tables whole",
                    actual="a part of its tables",
                )
        return False

    def _gathered(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """The first rows of the gathered tables; making the views anew costs 1 µs a group."""
        views = self._views.get(num_rows)
        if views is None:
            if len(self._views) >= CACHED_VIEWS:
                self._views.clear()
            views = tuple(table[:num_rows] for table in self.input_block_tables)
            self._views[num_rows] = views
        return views

    def _mapped(self, num_tokens: int) -> torch.Tensor:
        """The first columns of the slot mappings, likewise."""
        view = self._slot_views.get(num_tokens)
        if view is None:
            if len(self._slot_views) >= CACHED_VIEWS:
                self._slot_views.clear()
            view = self._slot_views[num_tokens] = self.slot_mappings[:, :num_tokens]
        return view

    def _staged_for_gather(self) -> HostRows | None:
        """The writes that a gather applies in its launch: none, unless a subclass puts them off."""
        return None

    def _staged(self, operation: str) -> HostRows | None:
        """The rows if they have staged writes: those stay until the device has taken them."""
        if not self._rows.pending:
            return None
        self._backend.refuse_capture(operation)
        return self._rows

    def _check_gather(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: Sequence[torch.Tensor] | None,
        out_ptrs: torch.Tensor | None,
        num_computed_tokens: torch.Tensor | None,
    ) -> tuple[int, int]:
        """Check the arguments of `gather_block_tables`; return num_reqs and num_reqs_padded."""
        num_reqs = arguments.check_rows(self.device, idx_mapping)
        num_reqs_padded = arguments.check_gather(
            self.layout, self.device, num_reqs, num_reqs_padded, out, num_computed_tokens
        )
        if out_ptrs is not None and out is None:
            raise InvalidArgumentError("out", expected="the tables out_ptrs names", actual="None")
        return num_reqs, num_reqs_padded

    def _check_tokens(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        replay_start: torch.Tensor | None,
        capacity: int,
    ) -> None:
        arguments.check_tokens(self.device, num_reqs, query_start_loc, positions, replay_start)
        if self._backend.reads_tensors_on_host:
            arguments.check_host_visible_batch(
                query_start_loc, num_reqs, positions.shape[0], capacity
            )

    def _check_slots_out(self, out: torch.Tensor) -> None:
        arguments.check_slots_out(self.layout, out, self.device, self._rows.largest_ids)


@contextmanager
def _naming_sizes(layout: TableLayout, device: torch.device) -> Iterator[None]:
    """Turn a refused allocation into an error that names the sizes which asked for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("out of memory", "allocate memory", "Storage size")
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        raise ConfigurationError(
            f"max_num_reqs={layout.max_num_reqs}, "
            f"max_num_batched_tokens={layout.max_num_batched_tokens}, row widths {layout.widths}",
            expected=f"buffers that fit the memory of {device}",
            actual=f"{layout.num_bytes:,} bytes, which were refused",
            hint="Lower max_num_reqs, max_num_blocks or max_num_batched_tokens",
        ) from error
