"""Calls that a healthy engine makes beside its steps, or does not make at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fused_slots import BlockTableError, SlotMappingMode
from tests.checker import TOKENS_OVER_CAPACITY, starts_at
from tests.configuration import INT32_MAX
from tests.driver import Driver
from tests.model import SENTINEL, Batch, Mismatch


class OddDriver(Driver):
    """A driver that also passes other buffers, malformed batches and refused appends."""

    def odd_calls(self, batch: Batch, free_rows: Sequence[int]) -> None:
        """Some of: other buffers, malformed batches, drafts, dummy runs, refused appends."""
        wild = self._wild_batch()
        if self.chance(0.15):
            self._gather_into_out(wild)
        if self.chance(0.2) and self.offers("other_out"):
            self._slots_into_out(wild)
        if self.chance(0.1):
            self.events["malformed step"] += 1
            self.run(wild, clean=False)
        if self.chance(0.15) and self.offers("map_tokens"):
            self._drafts()
        if self.chance(0.08):
            self._dummy_run()
        if self.chance(0.1) and self.offers("errors"):
            self._refused_append()
        if self.chance(0.05) and self.offers("faults"):
            self._tokens_over_capacity(wild)
        if free_rows and self.chance(0.05) and self.offers("redirect"):
            self._redirected_append(self.rng.choice(free_rows))

    def _wild_batch(self) -> Batch:
        """Repeated rows, dummies, rows that do not exist, positions beyond any row.

        Where faults are not offered: repeated rows that hold blocks, each with its first token.
        """
        rng, config = self.rng, self.config
        rows: Sequence[int] = range(config.max_num_reqs)
        malformed = self.offers("faults")
        if not malformed:
            rows = [
                row for row in rows if all(lengths[row] for lengths in self.check.model.lengths)
            ]
        idx, starts, positions, replay = [], [0], [], []
        for _ in range(rng.randint(0, config.max_num_reqs) if rows else 0):
            no_row = rng.choice((-1, -3, len(rows), len(rows) + 70, INT32_MAX))
            idx.append(no_row if malformed and rng.random() < 0.15 else rng.choice(rows))
            count = min(rng.choice((0, 1, 1, 2, 5)), config.capacity - starts[-1])
            positions += [self._wild_position() if malformed else 0 for _ in range(count)]
            starts.append(starts[-1] + count)
            replay.append(rng.choice((0, 0, rng.randrange(config.max_model_len))))
        replays = rng.random() < 0.5
        lengths = None
        if self.offers("replay_len") and replays and rng.random() < 0.6:
            lengths = [rng.choice((0, -1, 1, 5, 2**31 - 1, -(2**31))) for _ in idx]
            replay = [rng.choice((0, start, -3, 2**31 - 8, -(2**31))) for start in replay]
        computed = [self._computed_at_an_edge() for _ in range(config.max_num_reqs)]
        return Batch(
            idx,
            starts,
            positions,
            replay if replays else None,
            computed if rng.random() < 0.5 else None,
            lengths,
        )

    def _computed_at_an_edge(self) -> int:
        """Computed tokens about where a sliding window gives up another column."""
        group = self.rng.choice(self.config.groups)
        columns = self.rng.randrange(1 + self.config.max_model_len // group.tokens_per_column)
        edge = group.sliding_window_reach + columns * group.tokens_per_column
        return max(edge + self.rng.randint(-1, 1), 0)

    def _wild_position(self) -> int:
        rng, length = self.rng, self.config.max_model_len
        if rng.random() < 0.05:
            return rng.choice((2**31 - 1, 2**31, 2**40 + 7, -(2**63)))
        return rng.choice((-1, rng.randrange(length), rng.randrange(4 * length)))

    def _gather_into_out(self, batch: Batch) -> None:
        """Into tables of the caller: more rows than ours, repeated rows, wider than a row."""
        self.events["gather into out"] += 1
        rng = self.rng
        batch = batch._replace(
            idx_mapping=batch.idx_mapping * rng.choice((1, 2)), positions=[], query_start_loc=[0]
        )
        num_reqs = len(batch.idx_mapping)
        padded = num_reqs + rng.randint(0, 2)
        spare = rng.choice((0, 0, 3))
        out = [
            torch.full(
                (padded + rng.randint(0, 2), width + spare),
                SENTINEL,
                dtype=torch.int32,
                device=self.target.device,
            )
            for width in self.check.model.widths
        ]
        self.gather(batch, padded, out=out)

    def _slots_into_out(self, batch: Batch) -> None:
        """Into a buffer of another width and dtype, a part of a wider one."""
        rng, config = self.rng, self.config
        width = rng.choice((batch.num_tokens, batch.num_tokens + 3, config.capacity + 9))
        dtype = rng.choice((torch.int32, torch.int64))
        whole = torch.full(
            (len(config.groups), width + 8), SENTINEL, dtype=dtype, device=self.target.device
        )
        out = whole[:, 4 : 4 + width]
        mapped = self.manager.slot_mappings.clone()
        if dtype is torch.int32 and not self._fits_int32():
            self.events["int32 out refused"] += 1
            self._expect_error(lambda: self.map_slots(batch, width, False, out=out))
            return
        self.events["slots into out"] += 1
        self.map_slots(batch, width, False, out=out)
        outside = torch.cat([whole[:, :4], whole[:, 4 + width :]])
        if not bool((outside == SENTINEL).all()):
            raise Mismatch("compute_slot_mappings wrote outside its out")
        if not torch.equal(mapped, self.manager.slot_mappings):
            raise Mismatch("compute_slot_mappings with out changed slot_mappings")

    def _fits_int32(self) -> bool:
        if self.config.slot_dtype is torch.int32:
            return True
        return all(
            (largest + 1) * group.block_size <= 2**31
            or group.slot_mapping_mode is SlotMappingMode.NONE
            for largest, group in zip(self.check.model.largest_ids, self.config.groups, strict=True)
        )

    def _drafts(self) -> None:
        self.events["drafts"] += 1
        rng, config = self.rng, self.config
        count = rng.randint(0, config.capacity)
        rows = [rng.randrange(-1, config.max_num_reqs + 1) for _ in range(count)]
        positions = [rng.randrange(-1, config.max_model_len + 9) for _ in range(count)]
        mapped = self.manager.slot_mappings.clone()
        out = None
        if rng.random() < 0.4 and self._fits_int32():
            dtype = rng.choice((torch.int32, torch.int64))
            shape = (len(config.groups), count + rng.randint(0, 5))
            out = torch.full(shape, SENTINEL, dtype=dtype, device=self.target.device)
        result = self.manager.map_tokens(
            torch.tensor(rows, dtype=rng.choice((torch.int32, torch.int64))).to(self.target.device),
            torch.tensor(positions, dtype=torch.int64).to(self.target.device),
            out=out,
        )
        shape = (len(config.groups), config.capacity)
        buffer = result.as_strided(shape, result.stride()) if out is None else out
        self.check.drafts(rows, positions, result, buffer)
        if not torch.equal(mapped, self.manager.slot_mappings):
            raise Mismatch("map_tokens changed slot_mappings")

    def _dummy_run(self) -> None:
        """A dummy run: zeroed tables that the caller then writes into, PAD everywhere."""
        self.events["dummy run"] += 1
        manager, config = self.manager, self.config
        count = self.rng.randint(0, config.max_num_reqs)
        manager.slot_mappings.fill_(SENTINEL)
        tables = manager.get_dummy_block_tables(count)
        for g, (table, buffer) in enumerate(zip(tables, manager.input_block_tables, strict=True)):
            if not starts_at(table, buffer) or table.shape[0] != count:
                raise Mismatch(f"dummy table {g} is not the first {count} rows of its buffer")
            seen = buffer if self.offers("clean_buffers") else table
            if bool(seen.any()):
                raise Mismatch(f"dummy table {g} is not zero")
            table.fill_(SENTINEL)
        slots = manager.get_dummy_slot_mappings(self.rng.randint(0, config.capacity))
        if not starts_at(slots, manager.slot_mappings):
            raise Mismatch("dummy slots are not a view of slot_mappings")
        if not bool((manager.slot_mappings == -1).all()):
            raise Mismatch("dummy slots are not all PAD")
        self.check.check_rows()

    def _refused_append(self) -> None:
        """Each refused append leaves every group as it was."""
        rng, config, model = self.rng, self.config, self.check.model
        row = rng.randrange(config.max_num_reqs)
        g = rng.randrange(len(config.groups))
        ids: list[list[int]] = [[] for _ in config.groups]
        ids[0] = [config.first_ids[0]] if model.free_blocks(0, row, False) else []
        reason = rng.choice(("capacity", "negative", "too large", "row", "groups"))
        if reason == "capacity":
            ids[g] = [config.first_ids[g]] * (model.free_blocks(g, row, False) + 1)
        elif reason == "negative":
            ids[g] = [-1]
        elif reason == "too large":
            ids[g] = [config.max_block_id(g) + 1]
        elif reason == "row":
            row = rng.choice((-1, config.max_num_reqs))
        else:
            ids.append([])
        self.events[f"append refused: {reason}"] += 1
        self._expect_error(lambda: self.manager.append_block_ids(row, ids, overwrite=False))
        self.check.check_rows()

    def _expect_error(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BlockTableError:
            return
        raise Mismatch("a call that must be refused was accepted")

    def _tokens_over_capacity(self, batch: Batch) -> None:
        """More tokens than the output holds: refused by the host, or cut on the device."""
        excess = self.rng.randint(1, 5)
        idx = [*batch.idx_mapping, 0][-1:]
        over = Batch(idx, [0, self.config.capacity + excess], [0] * (self.config.capacity + excess))
        self.events["tokens over capacity"] += 1
        arguments = self._tensors(over)
        if self.manager._backend.reads_tensors_on_host:
            before = self.manager.slot_mappings.clone()
            self._expect_error(
                lambda: self.manager.compute_slot_mappings(*arguments[:3], self.config.capacity)
            )
            if not torch.equal(before, self.manager.slot_mappings):
                raise Mismatch("a refused batch changed slot_mappings")
            return
        self.check.check_faults()
        digest = self.check.pause_digest()
        self.map_slots(over, self.config.capacity, True, arguments)
        counted = {fault.code for fault in self.manager.take_faults()}
        if TOKENS_OVER_CAPACITY not in counted:
            raise Mismatch("tokens over the capacity were cut without a fault")
        self.check.forget_faults(digest)

    def _redirected_append(self, row: int) -> None:
        """While writes are redirected, every staged id becomes the null block."""
        self.events["redirected append"] += 1
        ids = self._random_ids(row)
        self.manager.redirect_writes_to_null_block = True
        self.manager.append_block_ids(row, ids, overwrite=True)
        self.manager.redirect_writes_to_null_block = False
        self.check.model.append(row, [[0] * len(group_ids) for group_ids in ids], True)
