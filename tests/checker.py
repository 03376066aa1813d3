"""Compares everything that a manager answers with both oracles.

`Checker` asks the scalar reference and the NumPy oracle what a call must have produced, compares
every element, keeps the digest of all results and accounts for every fault.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fused_slots import reference
from fused_slots.reference import Outcome
from tests import numpy_oracle
from tests.configuration import Config, Target
from tests.model import POISON, SENTINEL, Batch, Mismatch, TableModel

COLUMN_OUT_OF_ROW, EMPTY_RING, ROW_OUT_OF_RANGE, TOKENS_OVER_CAPACITY = 1, 2, 3, 4
NULL_BLOCK, DUPLICATE_POSITION = 5, 7
FAULT_OF_OUTCOME = {
    Outcome.COLUMN_OUT_OF_ROW: COLUMN_OUT_OF_ROW,
    Outcome.EMPTY_RING: EMPTY_RING,
    Outcome.ROW_OUT_OF_RANGE: ROW_OUT_OF_RANGE,
    Outcome.NULL_BLOCK: NULL_BLOCK,
}


def starts_at(view: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether a view begins where its buffer does; an empty one has no address."""
    return view.numel() == 0 or view.data_ptr() == buffer.data_ptr()


class Checker:
    """Compares a manager's answers with both oracles; raises `Mismatch` at the first difference."""

    def __init__(self, target: Target, config: Config, manager: Any) -> None:
        self.target = target
        self.config = config
        self.manager = manager
        widths = [table.shape[1] for table in manager.input_block_tables]
        self.model = TableModel(config, widths)
        self.faults: Counter[tuple[int, int]] = Counter()
        self.fault_details: Counter[tuple[int, int, int, int, int]] = Counter()
        self._last_faults: Counter[tuple[int, int]] = Counter()
        self._digest = hashlib.sha256()
        self.compared: Counter[str] = Counter()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # Rows

    def append(self, row: int, ids: Sequence[Any], overwrite: bool) -> None:
        self.manager.append_block_ids(row, ids, overwrite=overwrite)
        self.model.append(row, ids, overwrite)

    def applied(self) -> None:
        """Note that staged writes are on the device; poison what lies beyond the rows."""
        touched, cleared = sorted(self.model.pending), sorted(self.model.cleared)
        self.model.apply()
        for row in cleared:
            self._check_cleared(row)
        if "poison" in self.target.features:
            self.poison(touched)

    def clear_row(self, row: int) -> None:
        self.manager.clear_row(row)
        self.model.clear(row)

    def write(self, row: int, first_blocks: Sequence[Any], ids: Sequence[Any]) -> None:
        self.manager.write_block_ids(row, first_blocks, ids)
        self.model.write(row, first_blocks, ids)

    def _check_cleared(self, row: int) -> None:
        """State kernels read rows whatever their length: one given back has no id left."""
        for g, group in enumerate(self.config.groups):
            held, lengths = int(self.model.cells[g][row]), self.model.lengths[g]
            if group.maps_slots or lengths[row]:
                continue
            cells = self.manager.block_tables[g].gpu[row, :held].cpu().numpy()
            self.same(f"cells of cleared row {row} of group {g}", cells, np.zeros(held, np.int64))
            self.model.cells[g][row] = 0

    def poison(self, rows: Sequence[int]) -> None:
        for g, table in enumerate(self.manager.block_tables):
            for row in rows:
                table.gpu[row, int(self.model.lengths[g][row]) :] = POISON

    def check_rows(self) -> None:
        """Row lengths on host and device, and every live cell of the source tables."""
        host = np.array([[len(row) for row in rows] for rows in self.model.staged])
        device = np.array([[len(row) for row in rows] for rows in self.model.visible])
        self.same("num_blocks.np", self.manager.num_blocks.np, host)
        self.same("num_blocks.gpu", self.manager.num_blocks.gpu.cpu().numpy(), device)
        for g, table in enumerate(self.manager.block_tables):
            live = np.arange(self.model.widths[g]) < device[g][:, None]
            actual = np.where(live, table.gpu.cpu().numpy(), 0)
            self.same(f"block_tables[{g}].gpu", actual, np.where(live, self.model.tables[g], 0))

    # Gathered tables

    def gathered(
        self,
        batch: Batch,
        num_reqs_padded: int,
        result: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Check gathered tables: the returned views, and the whole buffers behind them."""
        model, config = self.model, self.config
        idx, computed = np.array(batch.idx_mapping, dtype=np.int64), batch.num_computed_tokens
        buffers = self.manager.input_block_tables if out is None else out
        for g, group in enumerate(config.groups):
            expected = np.zeros((num_reqs_padded, model.widths[g]), dtype=np.int64)
            for b, row in enumerate(batch.idx_mapping):
                if row >= config.max_num_reqs:
                    self._fault(ROW_OUT_OF_RANGE, g, row, -1, -1)
                elif row >= 0:
                    expected[b] = reference.gathered_row(
                        group,
                        model.visible[g][row],
                        model.widths[g],
                        None if computed is None else computed[row],
                        config.context_parallel,
                    )
            vectorised = numpy_oracle.gather(
                group,
                model.tables[g],
                model.lengths[g],
                idx,
                num_reqs_padded,
                None if computed is None else np.array(computed),
                config.context_parallel.size,
            )
            self.same(f"NumPy gather of group {g}", vectorised, expected)
            self._gathered_group(g, expected, result[g], buffers[g], out is not None)

    def _gathered_group(
        self,
        g: int,
        expected: np.ndarray,
        result: torch.Tensor,
        buffer: torch.Tensor,
        is_out: bool,
    ) -> None:
        if not starts_at(result, buffer):
            raise Mismatch(f"gathered table {g} is not a view of its buffer")
        end, width = expected.shape
        whole = np.zeros(buffer.shape, dtype=np.int64)
        whole[:end, :width] = expected
        if is_out:
            whole[end:] = SENTINEL
            self.same(f"out[{g}]", buffer.cpu().numpy(), whole)
        elif "clean_buffers" in self.target.features:
            self.same(f"input_block_tables[{g}]", buffer.cpu().numpy(), whole)
        actual = result.cpu().numpy()
        self.same(f"gathered table {g}", actual[:, :width], expected)
        self._digest.update(np.ascontiguousarray(actual[:, :width]).tobytes())

    # Slots

    def slots(
        self,
        batch: Batch,
        result: torch.Tensor,
        buffer: torch.Tensor,
        padded: int,
        of_step: bool = False,
    ) -> list[list[int]]:
        """Check the slots of a batch over the whole capacity; return them.

        A step's gather has counted the rows out of range, once an entry.
        """
        counted = self.faults.copy(), self.fault_details.copy()
        config, capacity = self.config, buffer.shape[1]
        entries = batch.token_entries()[:capacity]
        expected = reference.slot_mappings(
            config.groups,
            self.model.visible,
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            capacity,
            config.context_parallel,
            batch.replay_start,
            config.replay_window,
            batch.replay_len,
            config.null_block_id,
        )
        self._outcomes(batch, entries, expected)
        if config.checked and "repeats" in self.target.features:
            self._repeats(batch, entries)
        token_rows, token_entries = numpy_oracle.token_rows(
            np.array(batch.idx_mapping), np.array(batch.query_start_loc), capacity
        )
        replay = [
            None if numbers is None else np.array(numbers, dtype=np.int64)[token_entries]
            for numbers in (batch.replay_start, batch.replay_len)
        ]
        self._vectorised(token_rows, batch.positions[: len(token_rows)], replay, expected)
        if of_step:
            for now, before in zip((self.faults, self.fault_details), counted, strict=True):
                for place in [place for place in now if place[0] == ROW_OUT_OF_RANGE]:
                    now[place] = before[place]
                    if not now[place]:
                        del now[place]
        self._compare_slots("slots", expected, result, buffer, padded)
        return expected

    def drafts(
        self, rows: list[int], positions: list[int], result: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        """Check `map_tokens`: as slots, one token a request, without replay."""
        expected = [[-1] * buffer.shape[1] for _ in self.config.groups]
        batch = Batch(rows, [*range(len(rows) + 1)], positions)
        self._outcomes(batch, batch.token_entries(), expected, fill=True)
        self._vectorised(np.array(rows, dtype=np.int64), positions, [None, None], expected)
        self._compare_slots("drafts", expected, result, buffer, len(rows))

    def _outcomes(
        self, batch: Batch, entries: list[int], expected: list[list[int]], fill: bool = False
    ) -> None:
        """Count the faults that the reference's outcomes name, token by token."""
        config = self.config
        for g, group in enumerate(config.groups):
            for t, b in enumerate(entries):
                row = batch.idx_mapping[b]
                if row < 0:
                    continue
                known = row < config.max_num_reqs
                token = reference.map_token(
                    group,
                    self.model.visible[g][row] if known else None,
                    batch.positions[t],
                    config.context_parallel,
                    batch.replay_start[b] if batch.replay_start else 0,
                    config.replay_window,
                    batch.replay_len[b] if batch.replay_len else None,
                    config.null_block_id,
                )
                if fill:
                    expected[g][t] = token.slot
                elif token.slot != expected[g][t]:
                    raise Mismatch(f"the reference disagrees with itself: group {g}, token {t}")
                if token.outcome in FAULT_OF_OUTCOME:
                    code = FAULT_OF_OUTCOME[token.outcome]
                    self._fault(code, g, row, t, batch.positions[t])

    def _repeats(self, batch: Batch, entries: list[int]) -> None:
        """Count the tokens whose position their batch entry has had before."""
        seen: set[tuple[int, int]] = set()
        for t, b in enumerate(entries):
            row, position = batch.idx_mapping[b], batch.positions[t]
            if not 0 <= row < self.config.max_num_reqs or position < 0:
                continue
            for g, group in enumerate(self.config.groups):
                if (b, position) in seen and group.maps_slots:
                    self._fault(DUPLICATE_POSITION, g, row, t, position)
            seen.add((b, position))

    def _vectorised(
        self,
        rows: np.ndarray,
        positions: list[int],
        replay: list[np.ndarray | None],
        expected: list[list[int]],
    ) -> None:
        cp = self.config.context_parallel
        answer = numpy_oracle.map_tokens(
            self.config.groups,
            self.model.tables,
            self.model.lengths,
            rows,
            np.array(positions, dtype=np.int64),
            len(expected[0]),
            cp.size,
            cp.rank,
            cp.interleave,
            replay[0],
            self.config.replay_window,
            replay[1],
            self.config.null_block_id,
        )
        self.same("NumPy slots", answer.slots, np.array(expected, dtype=np.int64))
        for code, counts in zip((1, 2, 3, NULL_BLOCK), answer[1:], strict=True):
            for g, count in enumerate(counts.tolist()):
                if count != self._last_faults[code, g]:
                    raise Mismatch(f"the oracles count different faults {code} in group {g}")
        self._last_faults.clear()

    def _compare_slots(
        self,
        what: str,
        expected: list[list[int]],
        result: torch.Tensor,
        buffer: torch.Tensor,
        padded: int,
    ) -> None:
        if tuple(result.shape) != (len(expected), padded):
            raise Mismatch(f"{what}: shape {tuple(result.shape)}, not {(len(expected), padded)}")
        if not starts_at(result, buffer):
            raise Mismatch(f"{what} is not a view of its buffer")
        actual = buffer.cpu().numpy()
        if (actual == SENTINEL).any():
            raise Mismatch(f"{what}: {(actual == SENTINEL).sum()} sentinels left")
        self.same(what, actual, np.array(expected, dtype=np.int64))
        self._digest.update(actual.astype(np.int64).tobytes())

    # Faults

    def _fault(self, code: int, g: int, row: int, token: int, position: int) -> None:
        self.faults[code, g] += 1
        self.fault_details[code, g, row, token, position] += 1
        if token >= 0 and code != DUPLICATE_POSITION:
            self._last_faults[code, g] += 1

    def check_faults(self) -> None:
        """Take the manager's faults; they are those of the oracle, each exactly once."""
        records = self.manager.take_faults()
        if "repeats" not in self.target.features:
            records = [fault for fault in records if fault.code != DUPLICATE_POSITION]
        counted: Counter[tuple[int, int]] = Counter()
        detailed: Counter[tuple[int, int, int, int, int]] = Counter()
        for fault in records:
            counted[int(fault.code), fault.group] += fault.count
            if (fault.row, fault.token, fault.position) != (-1, -1, -1):
                place = (int(fault.code), fault.group, fault.row, fault.token, fault.position)
                detailed[place] += fault.count
        if counted != self.faults:
            raise Mismatch(f"faults {dict(counted)}, not {dict(self.faults)}")
        if detailed - self.fault_details:
            raise Mismatch(f"faults that did not happen: {detailed - self.fault_details}")
        if not self.config.checked and (detailed or len(records) != len(counted)):
            raise Mismatch("unchecked, a fault record is one (code, group) without a place")
        if self.config.checked and self.faults and not detailed:
            raise Mismatch("checked, the first faults have their place")
        if self.manager.take_faults():
            raise Mismatch("take_faults did not empty the record")
        self.faults.clear()
        self.fault_details.clear()
        self._digest.update(repr(sorted(counted.items())).encode())

    def forget_faults(self, digest: Any) -> None:
        """Leave a call out of the fault account and out of the digest."""
        self.faults.clear()
        self.fault_details.clear()
        self._digest = digest

    def pause_digest(self) -> Any:
        """A copy of the digest to come back to."""
        return self._digest.copy()

    def same(self, what: str, actual: np.ndarray, expected: np.ndarray) -> None:
        """Every element is equal."""
        self.compared[what.split("[")[0]] += 1
        if actual.shape == expected.shape and np.array_equal(actual, expected):
            return
        if actual.shape != expected.shape:
            raise Mismatch(f"{what}: shape {actual.shape}, not {expected.shape}")
        place = tuple(np.argwhere(actual != expected)[0].tolist())
        wrong = int((actual != expected).sum())
        raise Mismatch(
            f"{what}{list(place)} is {actual[place]}, not {expected[place]} ({wrong} elements)"
        )
