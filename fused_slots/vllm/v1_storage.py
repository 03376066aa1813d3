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
from fused_slots.host.block_ids import check_lists, check_row, plain_ids, raise_over_capacity
from fused_slots.threads import guard_threads

_INTS = frozenset({int})
_SHORT_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32)
INT64_MAX = 2**63 - 1

BlockIds = Sequence[int] | npt.NDArray[Any]
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

    def first(self, n: int) -> HostDeviceBuffer:
        """The first `n` entries of both."""
        return HostDeviceBuffer(self.cpu[:n], self.gpu[:n])

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
        snapshot_rows: what a commit sends is copied aside first, for a runner that writes into
            the rows while an earlier commit is on its way.
    """

    @torch.inference_mode(False)  # engines build in that mode, too, and write outside of it
    def __init__(
        self, manager: AscendBlockTables, pin_memory: bool, snapshot_rows: bool = False
    ) -> None:
        self.manager = manager
        layout, backend = manager.layout, manager._backend
        self.lengths = manager._rows.num_columns
        """Filled columns of each row, int32 [G, max_num_reqs]: the manager's own, to write."""
        self.on_host = manager.device.type == "cpu"
        self.pinned = pin_memory and not self.on_host
        self._snapshot_rows = snapshot_rows and not self.on_host
        mirror = torch.zeros(
            layout.arena_size, dtype=torch.int32, device="cpu", pin_memory=self.pinned
        )
        self._mirror, self._arena = mirror, backend.arena
        rows = layout.max_num_reqs
        self.tables = list(map(HostDeviceBuffer, backend.table_views(mirror), backend.tables))
        self.slots = [
            HostDeviceBuffer(
                row if self.on_host else torch.full_like(row, PAD_SLOT_ID, device="cpu"), row
            )
            for row in manager.slot_mappings
        ]
        self._batch_rows = torch.empty(rows, dtype=torch.int32, device=manager.device)
        self._cacheable = torch.empty(
            (layout.num_groups, 1), dtype=torch.bool, device=manager.device
        )
        self._fill_constants()
        self._committed = np.zeros_like(self.lengths, order="C")
        """The row lengths that the device has."""
        self._parts = [np.arange(group.columns_per_block) for group in layout.groups]
        self._scratch: torch.Tensor | None = None
        in_use = getattr(manager, "_in_use", None)
        if in_use is not None:
            guard_threads(self, in_use)
        if manager.recorder is not None:
            from fused_slots.recording.commits import record_commits

            record_commits(self, manager.recorder)

    def _fill_constants(self) -> None:
        rows = torch.arange(len(self._batch_rows), dtype=torch.int32, device="cpu")
        self._batch_rows.copy_(rows)
        groups = self.manager.layout.groups
        cacheable = [[group.maps_slots and group.prefix_cacheable] for group in groups]
        self._cacheable.copy_(
            torch.tensor(cacheable, dtype=torch.bool, device="cpu").view(len(groups), 1)
        )

    def restore_device_memory(self) -> None:
        """Make good every device tensor after its memory came back with arbitrary contents.

        The host has all rows and their lengths, so all of them are as after a commit of all rows.
        """
        manager = self.manager
        manager.init_block_table_layout_tensors()
        self._fill_constants()
        manager.slot_mappings.fill_(PAD_SLOT_ID)
        self.commit(manager.max_num_reqs, range(len(self.tables)))

    @property
    def scratch(self) -> torch.Tensor:
        """Slots of all groups, of which a caller wants one group's."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.manager.slot_mappings)
        return self._scratch

    def write_row(self, row: int, block_ids: Sequence[BlockIds], overwrite: bool) -> None:
        """Append blocks to a row in every group, or start it anew; for all groups or for none.

        Raises:
            InvalidArgumentError: no such row, or not one list of blocks per group.
            BlockIdError, RowCapacityError: as `append_block_ids`.
        """
        groups = range(len(self.tables))
        row = self._check_row("row_idx", row, groups)
        check_lists(self.manager.layout, f"block_ids of row {row}", block_ids, "lists")
        self._write(row, groups, block_ids, overwrite)

    def write_group_row(self, g: int, row: int, block_ids: BlockIds, overwrite: bool) -> None:
        """The same for one group; the others keep their rows."""
        self._write(self._check_row("row_idx", row, (g,)), (g,), (block_ids,), overwrite)

    def _write(
        self, row: int, groups: Sequence[int], block_ids: Sequence[BlockIds], overwrite: bool
    ) -> None:
        """Check all groups' ids, then write all of them."""
        layout, filled = self.manager.layout, self.lengths[:, row].tolist()
        checked = []
        for g, group_ids in zip(groups, block_ids, strict=True):
            ids = self._check_ids(row, g, group_ids)
            begin = 0 if overwrite else filled[g]
            end = begin + len(ids) * len(self._parts[g])
            if ids and end > layout.widths[g]:
                raise_over_capacity(layout, row, g, begin, end)
            checked.append((g, ids, begin, end))
        for g, ids, begin, end in checked:
            rows = self.tables[g].np
            if ids:
                parts = self._parts[g]
                rows[row, begin:end] = ids if len(parts) == 1 else split_blocks(ids, parts)
            if end < filled[g]:
                rows[row, end : filled[g]] = 0
            filled[g] = end
        self.lengths[:, row] = filled

    def _check_ids(self, row: int, g: int, group_ids: BlockIds) -> list[int]:
        """One group's ids as a list of ints that the group accepts."""
        layout = self.manager.layout
        is_plain = type(group_ids) is list and _INTS.issuperset(map(type, group_ids))
        if is_plain and (
            not group_ids or (min(group_ids) >= 0 and max(group_ids) <= layout.max_block_ids[g])
        ):
            return group_ids  # type: ignore[return-value]
        return plain_ids(layout, row, g, group_ids)  # type: ignore[arg-type]

    def clear_row(self, row: int, groups: Sequence[int]) -> None:
        """Empty a row: no block, and no stale entry that a kernel could take for a state slot."""
        row = self._check_row("row_idx", row, groups)
        for g in groups:
            self.tables[g].np[row] = 0
            self.lengths[g, row] = 0

    def move_row(self, src: int, tgt: int, groups: Sequence[int]) -> None:
        """Row `tgt` becomes what `src` was; `src` is empty afterwards."""
        src, tgt = self._check_row("src", src, groups), self._check_row("tgt", tgt, groups)
        if src == tgt:
            return
        for g in groups:
            self.tables[g].np[tgt] = self.tables[g].np[src]
            self.lengths[g, tgt] = self.lengths[g, src]
        self.clear_row(src, groups)

    def swap_row(self, src: int, tgt: int, groups: Sequence[int]) -> None:
        """Exchange two rows."""
        src, tgt = self._check_row("src", src, groups), self._check_row("tgt", tgt, groups)
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
        num_reqs = check_count("num_reqs", num_reqs, 0, layout.max_num_reqs, "max_num_reqs")
        if num_reqs == layout.max_num_reqs and len(groups) == layout.num_groups:
            self._send(self._mirror, self._arena)
        else:
            for g in groups:
                table = self.tables[g]
                self._send(table.cpu[:num_reqs], table.gpu[:num_reqs])
        self._commit_lengths(num_reqs, groups)

    def batch(self, num_reqs: int) -> torch.Tensor:
        """The rows of a batch: 0 ... num_reqs - 1, int32 on the device."""
        limit = self.manager.max_num_reqs
        return self._batch_rows[: check_count("num_reqs", num_reqs, 0, limit, "max_num_reqs")]

    def tokens(self, rows: Indices, positions: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of a flat list of tokens, on the device; none of them is cut short.

        Raises:
            InvalidArgumentError: they are no integers.
        """
        return (
            self._on_device(as_integers("req_indices", rows)),
            self._on_device(as_integers("positions", positions)).to(torch.int64),
        )

    def pad_replayed(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        replay_start: torch.Tensor,
        window: int,
    ) -> None:
        """PAD for replayed tokens in prefix-cacheable groups; without a wait for the device."""
        slots = self.manager.slot_mappings
        num_tokens = min(positions.shape[0], slots.shape[1])
        if not len(self.batch(num_reqs)) or not num_tokens:
            return
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=positions.device)
        entries = torch.searchsorted(query_start_loc[1 : num_reqs + 1], tokens, right=True)
        in_batch = entries < num_reqs
        starts = replay_start[entries.clamp_(max=num_reqs - 1)].long()
        since = positions[:num_tokens] - starts
        replayed = in_batch & (starts != 0) & (since >= 0) & (since < window)
        slots[:, :num_tokens].masked_fill_(replayed & self._cacheable, PAD_SLOT_ID)

    def _check_row(self, argument: str, row: int, groups: Sequence[int]) -> int:
        layout = self.manager.layout
        if type(row) is int and 0 <= row < layout.max_num_reqs:
            return row
        of_group = f" of {layout.describe(groups[0])}" if len(groups) == 1 else ""
        return check_row(layout, row, argument + of_group)

    def _commit_lengths(self, num_reqs: int, groups: Sequence[int]) -> None:
        new = self.lengths[groups, :num_reqs]
        if not np.array_equal(new, self._committed[groups, :num_reqs]):
            self._committed[groups, :num_reqs] = new
            self._send(torch.from_numpy(self._committed), self.manager.num_blocks.gpu, aside=True)

    def _send(self, source: torch.Tensor, target: torch.Tensor, aside: bool = False) -> None:
        """Copy to the device in stream order; `aside`: the source may change at once."""
        if self.pinned and (aside or self._snapshot_rows):
            # Freed before it has arrived: the allocator of pinned memory waits for the stream.
            copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            source = copy.copy_(source)
        target.copy_(source, non_blocking=True)

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        if values.device.type == "cpu" and self.pinned:
            values = values.pin_memory()
        return values.to(self.manager.device, non_blocking=True)


def as_integers(argument: str, values: Indices) -> torch.Tensor:
    """A list, an array or a tensor of integers as an int32 or int64 tensor of the same values.

    What is beyond int64 becomes the nearest int64, which is no row and no position either.

    Raises:
        InvalidArgumentError: they are of another type, such as float or bool.
    """
    if isinstance(values, torch.Tensor):
        if values.dtype in (torch.int32, torch.int64):
            return values
        if values.dtype in _SHORT_INTEGERS:
            return values.to(torch.int64)
        if values.dtype is not torch.uint64:
            raise _no_integers(argument, str(values.dtype))
        values = values.cpu().numpy()
    if isinstance(values, (list, tuple)):
        for kind in set(map(type, values)):
            if not issubclass(kind, (int, np.integer)) or kind is bool:
                raise _no_integers(argument, f"a {kind.__name__}")
        values = [min(max(int(value), -INT64_MAX - 1), INT64_MAX) for value in values]
    array = np.asarray(values, dtype=np.int64 if not len(values) else None)
    if array.dtype.kind not in "iu":
        raise _no_integers(argument, str(array.dtype))
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(INT64_MAX))
    if array.dtype not in (np.int32, np.int64):
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def _no_integers(argument: str, actual: str) -> InvalidArgumentError:
    return InvalidArgumentError(argument, expected="integers of any width", actual=actual)


def split_blocks(block_ids: BlockIds, parts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Kernel block ids k·n, k·n + 1, ... of each allocation block k; `parts` is 0 ... n - 1."""
    ids = as_integers("block_ids", block_ids).numpy().astype(np.int64, copy=False)
    columns: npt.NDArray[np.int64] = (ids[:, None] * len(parts) + parts).reshape(-1)
    return columns


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
