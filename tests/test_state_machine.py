"""Any sequence of calls: Hypothesis looks for one that differs and shrinks it.

Where the simulator lives an engine's life, this machine knows no engine: rows are written, read
and dropped in any order, with the same model and the same two oracles.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode
from tests.checker import Checker
from tests.configuration import FEATURES, Config, Target, make_manager
from tests.driver import Driver
from tests.host_halves import HALVES, staged_by
from tests.model import Batch

ROWS, CAPACITY, LENGTH = 3, 12, 24


@st.composite
def groups(draw: st.DrawFn, cp: ContextParallel) -> KVCacheGroup:
    """A group of any kind whose row holds a request of LENGTH tokens at most."""
    kind = draw(st.sampled_from(("paged", "none", "ring") if cp.size == 1 else ("paged", "none")))
    if kind == "ring":
        return KVCacheGroup(
            draw(st.integers(1, 5)), 1, circular=True
        )
    kernel_size = draw(st.integers(1, 6)) * cp.interleave
    mode = SlotMappingMode.NONE if kind == "none" else SlotMappingMode.TOKEN_TO_KV_SLOT
    return KVCacheGroup(
        kernel_size * draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        kernel_block_size=kernel_size,
        slot_mapping_mode=mode,
        dcp_sharded=draw(st.booleans()),
        prefix_cacheable=draw(st.booleans()),
        sliding_window_reach=draw(st.sampled_from((0, 0, 1, 7))),
    )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    size = draw(st.integers(1, 4))
    cp = ContextParallel(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 3)))
    some_groups = tuple(draw(st.lists(groups(cp), min_size=1, max_size=3)))
    return Config(
        groups=some_groups,
        max_num_reqs=ROWS,
        capacity=CAPACITY,
        context_parallel=cp,
        replay_window=draw(st.sampled_from((0, 4))),
        slot_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        first_ids=(1,) * len(some_groups),
        pool_sizes=(50,) * len(some_groups),
        num_blocks_known=draw(st.booleans()),
        checked=draw(st.booleans()),
        aligned_rows=draw(st.booleans()),
        max_model_len=LENGTH,
    )


rows = st.integers(0, ROWS - 1)
batch_rows = st.integers(-1, ROWS)
tokens = st.lists(st.integers(-1, LENGTH + 8), max_size=4)
batches = st.lists(st.tuples(batch_rows, tokens, st.integers(0, 9)), max_size=ROWS)
computed_tokens = st.none() | st.lists(st.integers(0, 40), min_size=ROWS, max_size=ROWS)


def to_batch(
    entries: list[tuple[int, list[int], int]], computed: list[int] | None, replay: bool
) -> Batch:
    starts = [0]
    for _, positions, _ in entries:
        starts.append(starts[-1] + len(positions))
    return Batch(
        [row for row, _, _ in entries],
        starts,
        [position for _, positions, _ in entries for position in positions],
        [start for _, _, start in entries] if replay else None,
        computed,
    )


class TablesMachine(RuleBasedStateMachine):
    """One manager under every call there is."""

    target = Target("cpu", make_manager, features=FEATURES - {"poison"})

    @initialize(config=configs(), half=st.sampled_from(HALVES))
    def build(self, config: Config, half: str) -> None:
        self.config = config
        with staged_by(half):
            manager = self.target.make(config)
        self.check = Checker(self.target, config, manager)
        self.driver = Driver(self.target, config, self.check, Random(0))

    @rule(row=rows, overwrite=st.booleans(), data=st.data())
    def append(self, row: int, overwrite: bool, data: st.DataObject) -> None:
        ids = [
            data.draw(
                st.lists(
                    st.integers(0, 50),
                    max_size=min(self.check.model.free_blocks(g, row, overwrite), 4),
                )
            )
            for g in range(len(self.config.groups))
        ]
        self.check.append(row, ids, overwrite)

    @rule()
    def apply(self) -> None:
        self.check.manager.apply_staged_writes()
        self.check.applied()

    @rule(entries=batches, computed=computed_tokens, replay=st.booleans(), seed=st.integers(0, 99))
    def run(self, entries: list[Any], computed: list[int] | None, replay: bool, seed: int) -> None:
        """Either one call or three, before or after staged writes are applied."""
        self.driver.rng.seed(seed)
        self.driver.run(to_batch(entries, computed, replay), clean=False)

    @rule(entries=batches, computed=computed_tokens, spare=st.integers(0, 2))
    def gather(self, entries: list[Any], computed: list[int] | None, spare: int) -> None:
        batch = to_batch(entries, computed, False)
        padded = min(len(batch.idx_mapping) + spare, ROWS)
        self.driver.gather(batch, padded)

    @rule(entries=batches, replay=st.booleans())
    def map_slots(self, entries: list[Any], replay: bool) -> None:
        self.driver.map_slots(to_batch(entries, None, replay), CAPACITY, prefill=True)

    @rule(pairs=st.lists(st.tuples(batch_rows, st.integers(-1, LENGTH)), max_size=CAPACITY))
    def map_drafts(self, pairs: list[tuple[int, int]]) -> None:
        draft_rows = [row for row, _ in pairs]
        positions = [position for _, position in pairs]
        result = self.check.manager.map_tokens(
            torch.tensor(draft_rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
        )
        whole = result.as_strided((len(self.config.groups), CAPACITY), result.stride())
        self.check.drafts(draft_rows, positions, result, whole)

    @rule(count=st.integers(0, ROWS))
    def dummy_run(self, count: int) -> None:
        """The caller of a dummy run writes into the tables it gets."""
        manager = self.check.manager
        for table in manager.get_dummy_block_tables(count):
            assert not table.any()
            table.fill_(9)
        manager.get_dummy_slot_mappings(CAPACITY)
        assert (manager.slot_mappings == -1).all()

    @precondition(lambda self: self.check.faults)
    @rule()
    def take_faults(self) -> None:
        self.check.check_faults()

    @invariant()
    def rows_are_as_written(self) -> None:
        if hasattr(self, "check"):
            self.check.check_rows()

    def teardown(self) -> None:
        if hasattr(self, "check"):
            self.check.check_faults()


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
