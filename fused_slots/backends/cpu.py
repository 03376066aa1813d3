"""The embedded default: vectorised NumPy on host memory.

Each operation loops over groups only; tokens and requests are array elements. Numbers that every
group needs (the row of each token, which tokens are padded whatever the group) are computed once a
call, and a rule that no token meets costs one reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fused_slots.backends.base import Backend, FaultReader, HostFaults, Sent, Step
from fused_slots.faults import FAULT_DETAILS, Fault, FaultCode, fault_records
from fused_slots.groups import PAD_SLOT_ID, KVCacheGroup
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from fused_slots.plan import LaunchPlan, WarmupReport

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}


class _Tokens(NamedTuple):
    """A call's tokens: position, row (0 where there is none), and who is padded whatever the group.

    `padded` covers dummies, rows out of range, negative positions; `replayed` what is replayed;
    `repeated` tokens whose position their batch entry has had before. None: no token is meant.
    """

    positions: Array
    rows: Array
    padded: Mask | None
    replayed: Mask | None
    repeated: Mask | None


class CpuBackend(Backend):
    """Block tables in host memory, read and written by NumPy on the calling thread."""

    name = "cpu"
    reads_tensors_on_host = True

    def __init__(self, layout: TableLayout, device: torch.device, checked: bool) -> None:
        super().__init__(layout, device, checked)
        self._arena = self.arena.numpy()
        self._tables = [table.numpy() for table in self.tables]
        self._entries = [table.reshape(-1) for table in self._tables]
        self._slots = self.slot_mappings.numpy()
        self._input_tables = [table.numpy() for table in self.input_tables]
        self._num_columns = self.num_columns.numpy()
        self._fault_counts = np.zeros((len(FaultCode) + 1, layout.num_groups), dtype=np.int64)
        self._fault_details: list[Fault] = []
        self._packets = self._bytes = 0
        self._null_block = layout.null_block_id
        self._dirty_columns = [0] * layout.num_groups
        most = max(*layout.widths, layout.max_num_reqs, layout.max_num_batched_tokens)
        self._numbers = np.arange(most + 1, dtype=np.int32)

    def apply_writes(self, staged: HostRows) -> None:
        """Write staged columns and row lengths."""
        self._packets += 1
        self._bytes += 4 * staged.packet_size
        writes = staged.collect()
        self._arena[writes.destinations(self.layout)] = writes.column_ids
        self._num_columns[:, writes.rows] = writes.filled.T

    def step(self, step: Step) -> None:
        if step.staged is not None:
            self.apply_writes(step.staged)
        if step.idx_mapping is not None:
            self.gather(step)
        if step.query_start_loc is not None:
            # Rows out of range are counted once.
            self._map_batch(step, count_rows=False)

    def gather(self, step: Step) -> None:
        """Copy the batch's rows into the gathered tables or the caller's."""
        assert step.idx_mapping is not None
        out, num_reqs_padded = step.tables_out, step.num_reqs_padded
        rows = step.idx_mapping.numpy()
        exists = self._existing_rows(rows)
        safe_rows = rows if exists is None else np.where(exists, rows, 0)
        computed = step.num_computed_tokens
        computed = None if computed is None else computed.numpy()[safe_rows]
        for g in range(self.layout.num_groups):
            lengths = self._num_columns[g, safe_rows]
            if exists is not None:
                lengths[~exists] = 0
            below_window = self._below_window(g, computed)
            if out is not None:
                table = out[g].numpy()
                self._copy_rows(g, safe_rows, lengths, below_window, table, table.shape[1])
                table[len(rows) : num_reqs_padded] = 0
            else:
                table = self._input_tables[g]
                self._copy_rows(g, safe_rows, lengths, below_window, table, self._dirty_columns[g])
                end = max(num_reqs_padded, self._dirty_rows)
                table[len(rows) : end, : self._dirty_columns[g]] = 0
                self._dirty_columns[g] = int(lengths.max(initial=0))
        if out is None:
            self._dirty_rows = len(rows)

    def map_slots(self, step: Step) -> None:
        self._map_batch(step, count_rows=True)

    def _map_batch(self, step: Step, count_rows: bool) -> None:
        assert step.idx_mapping is not None
        assert step.query_start_loc is not None
        assert step.positions is not None
        rows = step.idx_mapping.numpy()
        num_reqs = len(rows)
        starts = step.query_start_loc.numpy()[: num_reqs + 1]
        num_tokens = int(starts[num_reqs])
        token_positions = step.positions.numpy()[:num_tokens]
        replay = self._replay(step, num_reqs)
        if not self._one_token_each(starts, num_reqs, num_tokens):
            lengths = starts[1:] - starts[:-1]
            rows = rows.repeat(lengths)
            replay = [ends.repeat(lengths) for ends in replay]
        replayed = None
        if replay:
            begin, end = replay
            replayed = _any_or_none((token_positions >= begin) & (token_positions < end))
        repeated = _repeated(starts, token_positions) if self.checked else None
        slots = self._slots if step.slots_out is None else step.slots_out.numpy()
        self._map(rows, token_positions, replayed, slots, repeated, count_rows)

    def map_tokens(self, rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._map(rows.numpy(), positions.numpy(), None, out.numpy())

    def clear_input_tables(self, num_reqs: int) -> None:
        end = max(num_reqs, self._dirty_rows)
        for table in self._input_tables:
            table[:end] = 0
        self._dirty_rows = num_reqs
        self.forget_gathered()

    def forget_gathered(self) -> None:
        self._dirty_columns = list(self.layout.widths)

    def restore(self, rows: HostRows) -> None:
        super().restore(rows)
        self.take_faults()

    def take_faults(self) -> list[Fault]:
        detailed, self._fault_details = self._fault_details, []
        faults = fault_records(self._fault_counts, detailed)
        self._fault_counts[:] = 0
        return faults

    def sent(self) -> Sent:
        return Sent(self._packets, self._bytes, 0)

    def fault_reader(self) -> FaultReader:
        return HostFaults(self._fault_counts)

    def launch_plan(self, num_reqs: int, num_tokens: int, max_query_len: int | None) -> LaunchPlan:
        return LaunchPlan(
            grid=(self.layout.num_groups, 1),
            variant="",
            reason=f"NumPy maps all {num_tokens} tokens of a group at once",
        )

    def warmup(self) -> WarmupReport:
        return WarmupReport(variants=[], seconds=0.0)

    def try_launch(self) -> None:
        """Nothing: there are no kernels."""

    def refuse_capture(self, operation: str) -> None:
        """Nothing: the CPU has no graphs."""

    def _replay(self, step: Step, num_reqs: int) -> list[Array]:
        """First and end of each batch entry's replayed positions, int64; none: nothing is."""
        if step.replay_start is None or (step.replay_len is None and not self.layout.replay_window):
            return []
        begin = step.replay_start.numpy()[:num_reqs].astype(np.int64)
        if step.replay_len is None:
            return [begin, begin + self.layout.replay_window * (begin != 0)]
        return [begin, begin + step.replay_len.numpy()[:num_reqs]]

    def _one_token_each(self, starts: Array, num_reqs: int, num_tokens: int) -> bool:
        """Whether every batch entry has one token, as when all decode."""
        if num_tokens != num_reqs:
            return False
        # Comparing memory takes a quarter of the time that comparing elements does.
        return starts.tobytes() == self._numbers[: num_reqs + 1].tobytes()

    def _all_exist(self, rows: Array) -> bool:
        """Whether every one of these (at least one) names a row."""
        # As unsigned numbers, negative ones are too large as well. NumPy finds the place of the
        # largest sooner than the largest.
        unsigned = rows.view(_UNSIGNED[rows.dtype])
        return bool(unsigned[unsigned.argmax()] < self.layout.max_num_reqs)

    def _existing_rows(self, rows: Array) -> Mask | None:
        """Which batch entries name a row; None = all. Rows out of range are counted."""
        if not len(rows) or self._all_exist(rows):
            return None
        too_large = rows >= self.layout.max_num_reqs
        for g in range(self.layout.num_groups):
            self._count(FaultCode.ROW_OUT_OF_RANGE, g, too_large, rows)
        exists: Mask = (rows >= 0) & ~too_large
        return exists

    def _below_window(self, g: int, computed: Array | None) -> Array | None:
        """Per batch entry, the columns below the sliding window; None = nothing is nulled."""
        group = self.layout.groups[g]
        if computed is None or not group.sliding_window_reach:
            return None
        if self.layout.context_parallel.size > 1:
            return None
        first_readable = np.maximum(computed.astype(np.int64) - group.sliding_window_reach, 0)
        columns: Array = first_readable // group.tokens_per_column
        return columns

    def _copy_rows(
        self,
        g: int,
        rows: Array,
        lengths: Array,
        below_window: Array | None,
        table: Array,
        dirty_columns: int,
    ) -> None:
        """Copy each row's live columns and zero the rest of what may be dirty."""
        if not len(rows):
            return
        filled = int(lengths.max())
        live = self._tables[g][rows, :filled]
        uniform = int(lengths.min())
        if uniform < filled:
            live[:, uniform:] *= self._numbers[uniform:filled] < lengths[:, None]
        if below_window is not None and below_window.any():
            nulled = min(int(below_window.max()), filled)
            live[:, :nulled] *= self._numbers[:nulled] >= below_window[:, None]
        table[: len(rows), :filled] = live
        table[: len(rows), filled:dirty_columns] = 0

    def _map(
        self,
        rows: Array,
        positions: Array,
        replayed: Mask | None,
        out: Array,
        repeated: Mask | None = None,
        count_rows: bool = True,
    ) -> None:
        num_tokens = len(positions)
        if num_tokens < out.shape[1]:
            out[:, num_tokens:] = PAD_SLOT_ID
        if not num_tokens:
            return
        no_row, too_large = None, None
        if not self._all_exist(rows):
            too_large = rows >= self.layout.max_num_reqs
            no_row = (rows < 0) | too_large
        negative = positions < 0 if positions[positions.argmin()] < 0 else None
        tokens = _Tokens(
            positions if negative is None else np.where(negative, 0, positions),
            (rows if no_row is None else np.where(no_row, 0, rows)).astype(np.int64, copy=False),
            _union(no_row, negative),
            replayed,
            repeated,
        )
        for g, group in enumerate(self.layout.groups):
            if not group.maps_slots:
                out[g, :num_tokens] = PAD_SLOT_ID
                continue
            if too_large is not None and count_rows:
                self._count(FaultCode.ROW_OUT_OF_RANGE, g, too_large, rows, positions)
            self._map_group(g, group, tokens, out[g, :num_tokens])

    def _map_group(self, g: int, group: KVCacheGroup, tokens: _Tokens, out: Array) -> None:
        padded = tokens.padded
        if tokens.repeated is not None:
            self._count_live(FaultCode.DUPLICATE_POSITION, g, tokens.repeated, padded, tokens)
        if group.prefix_cacheable and tokens.replayed is not None:
            padded = _union(padded, tokens.replayed)
        if group.kind.is_paged:
            column, offset, other_rank = self._locate(g, group, tokens.positions)
            code = FaultCode.COLUMN_OUT_OF_ROW
            padded = _union(padded, other_rank)
        else:
            column, offset = group.kind.locate(tokens.positions, group.block_size)
            code = FaultCode.EMPTY_RING
        missing = _any_or_none(column >= self._num_columns[g].take(tokens.rows))
        if missing is not None:
            column = np.where(missing, 0, column)
            self._count_live(code, g, missing, padded, tokens)
            padded = _union(padded, missing)
        element = tokens.rows * self.layout.widths[g]
        element += column
        block_ids = self._entries[g].take(element)
        if self._null_block is not None:
            null = _any_or_none(block_ids // group.columns_per_block == self._null_block)
            if null is not None:
                self._count_live(FaultCode.NULL_BLOCK, g, null, padded, tokens)
                padded = _union(padded, null)
        np.multiply(block_ids, group.tokens_per_column, dtype=out.dtype, out=out)
        out += offset.astype(out.dtype, copy=False)
        if padded is not None:
            out[padded] = PAD_SLOT_ID

    def _locate(
        self, g: int, group: KVCacheGroup, positions: Array
    ) -> tuple[Array, Array, Mask | None]:
        """Column and offset of each token, and which tokens another rank owns."""
        size, rank = self.layout.shards(g)
        if size == 1:
            column, offset = _divmod(positions, group.tokens_per_column)
            return column, offset, None
        interleave = self.layout.context_parallel.interleave
        virtual_block, virtual_offset = _divmod(positions, group.block_size * size)
        stripe_of_rank, within = _divmod(virtual_offset, interleave)
        stripe, owner = _divmod(stripe_of_rank, size)
        local = stripe * interleave + within
        column, offset = _divmod(local, group.tokens_per_column)
        column += virtual_block * group.columns_per_block
        return column, offset, _any_or_none(owner != rank)

    def _count_live(
        self, code: FaultCode, g: int, faulty: Mask, padded: Mask | None, tokens: _Tokens
    ) -> None:
        """Count the faulty tokens that are not padded for another reason."""
        if padded is not None:
            faulty = faulty & ~padded
        self._count(code, g, faulty, tokens.rows, tokens.positions)

    def _count(
        self,
        code: FaultCode,
        g: int,
        faulty: Mask,
        rows: Array,
        positions: Array | None = None,
    ) -> None:
        self._fault_counts[code, g] += int(np.count_nonzero(faulty))
        if not self.checked:
            return
        room = FAULT_DETAILS - len(self._fault_details)
        for t in np.flatnonzero(faulty)[:room].tolist():
            token, position = (-1, -1) if positions is None else (t, int(positions[t]))
            self._fault_details.append(Fault(code, g, 1, int(rows[t]), token, position))


def _divmod(values: Array, divisor: int) -> tuple[Array, Array]:
    """Quotient and remainder of non-negative values; a shift and a mask where that is exact."""
    if divisor & (divisor - 1) == 0:
        return values >> (divisor.bit_length() - 1), values & (divisor - 1)
    quotient = values // divisor
    return quotient, values - quotient * divisor


def _repeated(starts: Array, positions: Array) -> Mask | None:
    """Tokens whose position an earlier token of the same batch entry has; None = no token."""
    entries = np.arange(len(starts) - 1).repeat(starts[1:] - starts[:-1])
    order = np.lexsort((positions, entries))
    entries, positions = entries[order], positions[order]
    same = (entries[1:] == entries[:-1]) & (positions[1:] == positions[:-1])
    repeated = np.zeros(len(order), dtype=bool)
    repeated[order[1:]] = same
    return _any_or_none(repeated)


def _union(first: Mask | None, second: Mask | None) -> Mask | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second


def _any_or_none(mask: Mask) -> Mask | None:
    return mask if np.count_nonzero(mask) else None
