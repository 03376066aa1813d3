"""A long life holds no more than a short one: memory, objects and what a manager keeps.

Batch sizes, callers' tables and appends change all the time, so every cache is filled to its bound
in the warm-up.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup
from fused_slots.backends.interpreter import InterpreterBackend
from fused_slots.backends.launch import Launch, Launcher
from fused_slots.backends.pinned import PinnedRing
from fused_slots.base_tables import CACHED_VIEWS
from fused_slots.host.rows import HostRows
from fused_slots.layout import TableLayout
from tests.backends_under_test import MakeTables
from tests.memory import kept_by, resident_kib

GROUPS = (KVCacheGroup(16, 8), KVCacheGroup(8, 16, 4, sliding_window_reach=20))
WIDTH = max(group.row_width for group in GROUPS)
NUM_REQS = CACHED_VIEWS + 40
"""More batch sizes than a manager keeps views of."""
OUT_PLACES = 20_000
"""Different tables of the caller's own, so that hardly any comes twice."""


class Held(NamedTuple):
    """What is held at one moment."""

    entries: int
    tensor_bytes: int
    objects: int
    blocks: int
    """Small blocks of Python's allocator."""
    resident_kib: int

    @classmethod
    def now(cls, *owners: object) -> Held:
        gc.collect()
        objects = len(gc.get_objects())
        return cls(*kept_by(*owners), objects, sys.getallocatedblocks(), resident_kib())


ALLOWED = Held(entries=400, tensor_bytes=8192, objects=600, blocks=2500, resident_kib=4096)
"""By how much the most of a long life may exceed the most of its warm-up.

Caches that are emptied when full go up and down by a few hundred entries.
"""


def check_flat(life: Iterator[None], warm_up: int, steps: int, *owners: object) -> None:
    """Go on with a life, and compare what is held every now and then with its warm-up."""

    def most(count: int) -> Held:
        moments = []
        for _ in range(8):
            for _ in range(count // 8):
                next(life)
            moments.append(Held.now(*owners))
        return Held(*map(max, zip(*moments, strict=True)))

    before = most(warm_up)
    after = most(steps)
    grown = Held(*(now - then for now, then in zip(after, before, strict=True)))
    assert all(growth <= allowed for growth, allowed in zip(grown, ALLOWED, strict=True)), grown


def steps_of(tables: AscendBlockTables, rng: Random) -> Iterator[None]:
    """Steps without end: any number of requests, tables of the caller's own, appends."""
    rows, capacity = tables.max_num_reqs, tables.max_num_batched_tokens
    arena = torch.ones((len(GROUPS), OUT_PLACES + rows, WIDTH), dtype=torch.int32)
    positions = torch.zeros(capacity, dtype=torch.int64)
    narrow = torch.zeros((len(GROUPS), capacity), dtype=torch.int32)
    while True:
        num_reqs = rng.randint(1, min(rows, capacity))
        for row in rng.sample(range(rows), min(3, rows)):
            ids = [*range(1, rng.randint(1, 8) + 1)]
            tables.append_block_ids(row, [ids, ids], overwrite=True)
        idx = torch.randint(rows, (num_reqs,))
        starts = torch.arange(num_reqs + 1, dtype=torch.int32)
        if rng.random() < 0.5:
            tables.step(idx, starts, positions[:num_reqs])
        else:
            tables.apply_staged_writes()
            first = rng.randrange(OUT_PLACES)
            tables.gather_block_tables(idx, num_reqs, [*arena[:, first:]])
            tables.map_tokens(idx, positions[:num_reqs], narrow)
        tables.take_faults()
        yield


class Event:
    """A device's event, at once."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def packets_of(ring: PinnedRing, layout: TableLayout, rng: Random) -> Iterator[None]:
    """Uploads without end, of any size."""
    rows = HostRows(layout)
    while True:
        for row in rng.sample(range(layout.max_num_reqs), rng.randint(1, 8)):
            ids = [*range(1, rng.randint(1, 8) + 1)]
            rows.stage(row, [ids, ids], True)
        ring.upload(rows.packet_size, rows.pack)
        rows.clear()
        ring.mark_used()
        yield


def test_twenty_thousand_steps_hold_no_more_than_a_few() -> None:
    tables = MakeTables("cpu")(GROUPS, max_num_reqs=NUM_REQS, max_num_batched_tokens=NUM_REQS)
    check_flat(steps_of(tables, Random(0)), 2_000, 18_000, tables)
    assert tables._gathered.cache_info().currsize <= CACHED_VIEWS


class Unlaunched(Launcher):
    """Launches nothing: what the host keeps does not depend on what kernels do."""

    compiled = 0

    def prepare(self, *variant: Any) -> Launch:
        return lambda programs, tensors, numbers: None


def test_the_kernels_host_path_keeps_to_the_bounds_of_its_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # asked for before anything is built
    monkeypatch.setattr(InterpreterBackend, "make_launcher", lambda backend: Unlaunched())
    tables = MakeTables("cpu", "interpreter")(
        GROUPS, max_num_reqs=NUM_REQS, max_num_batched_tokens=NUM_REQS
    )
    check_flat(steps_of(tables, Random(0)), 500, 4_000, tables)


def test_the_ring_of_packets_keeps_as_many_as_it_has_places() -> None:
    layout = MakeTables("cpu")(GROUPS, max_num_reqs=64, max_num_batched_tokens=8).layout
    ring = PinnedRing(torch.device("cpu"), new_event=Event, on_device=nullcontext)
    check_flat(packets_of(ring, layout, Random(0)), 300, 1_500, ring)
