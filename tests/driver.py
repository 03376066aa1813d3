"""How the simulator calls a manager for one step: every order of calls and shape of arguments.

Each call is checked by the `Checker` right away. Random numbers are drawn whatever the target
offers, so that one seed gives one digest on every full-featured backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TypeVar

import numpy as np
import torch

from tests.checker import Checker
from tests.configuration import Config, Target
from tests.model import SENTINEL, Batch, Mismatch

Owner = TypeVar("Owner")
GARBAGE = 1 << 40
"""What lies in positions beyond the last token; nobody may read it."""


class Driver:
    """Stages, runs and inspects; `events` counts what was done."""

    def __init__(self, target: Target, config: Config, check: Checker, rng: Random) -> None:
        self.target = target
        self.config = config
        self.check = check
        self.manager = check.manager
        self.rng = rng
        self.events: Counter[str] = Counter()
        self.clean = False
        """Whether the last step and gather were an engine's own, as check_integrity wants."""
        self._any_row = False
        """Whether the batch has rows that no request may hold."""
        if "poison" in target.features:
            check.poison(range(config.max_num_reqs))
        self._compare_newborn()

    def offers(self, feature: str) -> bool:
        return feature in self.target.features

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Staging

    def stage(self, row: int, ids: list[list[int]], overwrite: bool) -> None:
        """Stage a request's blocks in one of the orders that must come out the same."""
        rng, check = self.rng, self.check
        draw = rng.random()
        if overwrite and draw < 0.15:
            self.events["overwritten before it was applied"] += 1
            check.append(row, self._random_ids(row), True)
        if overwrite and 0.1 < draw < 0.25:
            self.events["overwrite with nothing, then append"] += 1
            check.append(row, [[] for _ in ids], True)
            overwrite = False
        if 0.2 < draw < 0.4:
            self.events["overwrite then append" if overwrite else "append twice"] += 1
            cut = [rng.randint(0, len(group_ids)) for group_ids in ids]
            first = [group_ids[:c] for group_ids, c in zip(ids, cut, strict=True)]
            check.append(row, first, overwrite)
            ids, overwrite = [a[c:] for a, c in zip(ids, cut, strict=True)], False
        if overwrite or any(ids) or draw > 0.9:
            arrays = [np.array(a, dtype=np.int64) for a in ids]
            check.append(row, tuple(arrays if draw > 0.8 else ids), overwrite)

    def vacate(self, row: int) -> None:
        """Give a row back, or leave what it holds until it is overwritten."""
        if self.offers("row_writes") and self.chance(0.5):
            self.events["row cleared"] += 1
            if self.chance(0.1):
                self.check.append(row, self._random_ids(row), True)
            self.check.clear_row(row)

    def write(self, row: int, first_blocks: list[int], ids: list[list[int]]) -> None:
        """Stage a row's tail in one call or in two that come out the same."""
        self.events["row written from a block on" if any(ids) else "row cut"] += 1
        firsts = np.array(first_blocks) if self.chance(0.3) else tuple(first_blocks)
        if self.chance(0.3):
            model, groups = self.check.model, self.config.groups
            held = [len(rows[row]) // group.columns_per_block
                    for rows, group in zip(model.staged, groups, strict=True)]  # fmt: skip
            more = [self.rng.randint(first, end) for first, end in zip(firsts, held, strict=True)]
            self.check.write(row, more, [[] for _ in ids])
        self.check.write(row, firsts, ids)

    def _random_ids(self, row: int) -> list[list[int]]:
        config, ids = self.config, []
        for g, (first, count) in enumerate(zip(config.first_ids, config.pool_sizes, strict=True)):
            room = min(self.check.model.free_blocks(g, row, True), 6)
            ids.append(
                [first + self.rng.randrange(count) for _ in range(self.rng.randint(0, room))]
            )
        return ids

    # A step

    def decorate(
        self, batch: Batch, owners: list[Owner | None]
    ) -> tuple[Batch, list[Owner | None]]:
        """Add dummies and empty requests to a batch, up to the number of rows."""
        idx, owners = list(batch.idx_mapping), list(owners)
        starts, positions = list(batch.query_start_loc), list(batch.positions)
        replay = None if batch.replay_start is None else list(batch.replay_start)
        lengths = None if batch.replay_len is None else list(batch.replay_len)
        self._any_row = False
        while self.offers("dummies") and len(idx) < self.config.max_num_reqs and self.chance(0.15):
            b = self.rng.randint(0, len(idx))
            row = self.rng.choice((-1, -1, self.rng.randrange(self.config.max_num_reqs)))
            room = self.config.capacity - starts[-1]
            count = self.rng.randint(0, min(room, 2)) if row < 0 else 0
            self.events["dummy in the batch" if row < 0 else "empty request"] += 1
            self._any_row |= row >= 0
            idx.insert(b, row)
            owners.insert(b, None)
            if replay is not None:
                replay.insert(b, 0)
            if lengths is not None:
                lengths.insert(b, self.rng.randint(-1, 3))
            positions[starts[b] : starts[b]] = [self.rng.randint(-2, 50) for _ in range(count)]
            starts = starts[: b + 1] + [start + count for start in starts[b:]]
        return batch._replace(
            idx_mapping=idx,
            query_start_loc=starts,
            positions=positions,
            replay_start=replay,
            replay_len=lengths,
        ), owners

    def run(self, batch: Batch, clean: bool) -> list[list[int]]:
        """Apply, gather and map one batch, in one call or in three; return its slots."""
        config, manager = self.config, self.manager
        num_reqs = len(batch.idx_mapping)
        reqs_padded = self.rng.randint(num_reqs, config.max_num_reqs)
        tokens_padded = self.rng.randint(min(batch.num_tokens, config.capacity), config.capacity)
        one_call, stale, prefill = self.chance(0.6), self.chance(0.1), self.chance(0.5)
        if stale and self.offers("faults"):
            self.events["read before staged writes are applied"] += 1
            self.gather(batch, reqs_padded)
            self.map_slots(batch, tokens_padded, prefill)
        arguments = self._tensors(batch)
        idx, starts, positions, replay, computed, lengths = arguments
        if not (one_call and self.offers("step")):
            self.events["three calls"] += 1
            manager.apply_staged_writes()
            self.check.applied()
            self.gather(batch, reqs_padded, arguments)
            slots = self.map_slots(batch, tokens_padded, prefill, arguments)
        else:
            self.events["step"] += 1
            if prefill:
                manager.slot_mappings.fill_(SENTINEL)
            launches = manager.launches
            tables, result = manager.step(
                idx,
                starts,
                positions,
                num_reqs_padded=reqs_padded,
                num_tokens_padded=tokens_padded,
                num_computed_tokens=computed,
                replay_start=replay,
                **({} if lengths is None else {"replay_len": lengths}),
            )
            if manager.launches != launches + 1:
                raise Mismatch(f"a step took {manager.launches - launches} launches")
            self.check.applied()
            self.check.gathered(batch, reqs_padded, tables)
            slots = self.check.slots(batch, result, manager.slot_mappings, tokens_padded, True)
        if self.offers("step"):
            self._check_nothing_pending()
        self.clean = clean and not self._any_row
        return slots

    def _check_nothing_pending(self) -> None:
        """Staged writes are applied once; what is not staged is no launch."""
        launches = self.manager.launches
        self.manager.apply_staged_writes()
        if self.manager.launches != launches:
            raise Mismatch("writes were still staged after they had been applied")

    def _tensors(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """The batch as tensors, often longer than it is, with garbage behind its end."""
        spare = self.rng.choice((0, 0, 1, 7))
        index_dtype = self.rng.choice((torch.int32, torch.int64))
        self.events["arrays longer than the batch"] += bool(spare)

        def tensor(values: Sequence[int], dtype: torch.dtype, garbage: int) -> torch.Tensor:
            longer = [*values, *[garbage] * spare]
            return torch.tensor(longer, dtype=dtype).to(self.target.device)

        idx = torch.tensor(batch.idx_mapping, dtype=index_dtype).to(self.target.device)
        replay, computed = batch.replay_start, batch.num_computed_tokens
        return (
            idx,
            tensor(batch.query_start_loc, torch.int32, -5),
            tensor(batch.positions, torch.int64, GARBAGE),
            None if replay is None else tensor(replay, torch.int32, 1),
            None if computed is None else tensor(computed, torch.int32, 1),
            None if batch.replay_len is None else tensor(batch.replay_len, torch.int32, 1 << 30),
        )

    def gather(
        self,
        batch: Batch,
        reqs_padded: int,
        arguments: tuple[torch.Tensor | None, ...] | None = None,
        out: list[torch.Tensor] | None = None,
    ) -> None:
        idx, _, _, _, computed, _ = arguments or self._tensors(batch)
        self.clean = False  # unless `run` says otherwise: rows without a request may be gathered
        result = self.manager.gather_block_tables(
            idx, reqs_padded, out=out, num_computed_tokens=computed
        )
        self.check.gathered(batch, reqs_padded, result, out)

    def map_slots(
        self,
        batch: Batch,
        tokens_padded: int,
        prefill: bool,
        arguments: tuple[torch.Tensor | None, ...] | None = None,
        out: torch.Tensor | None = None,
    ) -> list[list[int]]:
        idx, starts, positions, replay, _, lengths = arguments or self._tensors(batch)
        buffer = self.manager.slot_mappings if out is None else out
        if prefill:
            buffer.fill_(SENTINEL)
        keywords = {"out": out} | ({"replay_start": replay} if self.offers("replay") else {})
        if lengths is not None:
            keywords["replay_len"] = lengths
        result = self.manager.compute_slot_mappings(
            idx, starts, positions, tokens_padded, **keywords
        )
        if out is None:
            self.clean = False
        return self.check.slots(batch, result, buffer, tokens_padded)

    # Inspection

    def inspect(self) -> None:
        """Faults, integrity, rows and explanations, now and then."""
        if self.chance(0.3) and self.offers("faults"):
            self.check.check_faults()
        if self.chance(0.1):
            self.events["rows checked"] += 1
            self.check.check_rows()
        if self.chance(0.1) and self.clean and self.offers("integrity"):
            self.events["integrity checked"] += 1
            self.manager.check_integrity()
        if self.chance(0.1) and self.offers("explain"):
            self._explain()

    def _explain(self) -> None:
        self.events["explained"] += 1
        rng, config = self.rng, self.config
        row, position = rng.randrange(config.max_num_reqs), rng.randrange(config.max_model_len)
        start = rng.choice((0, rng.randrange(config.max_model_len)))
        length = rng.choice((None, rng.randint(-1, 9))) if self.offers("replay_len") else None
        batch = Batch(
            [row], [0, 1], [position], [start], replay_len=None if length is None else [length]
        )
        slots = self.map_slots(batch, 1, True)
        for g in range(len(config.groups)):
            told = self.manager.explain(
                g,
                row,
                position,
                replay_start=start,
                **({} if length is None else {"replay_len": length}),
            )
            if told.slot != slots[g][0] or str(told.slot) not in str(told):
                raise Mismatch(f"explain says {told.slot}, the slot is {slots[g][0]}: {told}")

    def finish(self) -> None:
        """The last look at everything."""
        self.manager.apply_staged_writes()
        self.check.applied()
        self.check.check_rows()
        if self.offers("faults"):
            self.check.check_faults()

    def _compare_newborn(self) -> None:
        """A manager's slots are PAD and its rows empty from birth."""
        if self.offers("clean_buffers") and not bool((self.manager.slot_mappings == -1).all()):
            raise Mismatch("slot_mappings is not PAD from birth")
        self.check.check_rows()
