"""A captured `step` replayed between other calls; a replay is the recorded launch, run again."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from fused_slots import AscendBlockTables, KVCacheGroup
from tests.backends_under_test import MakeTables

ROWS = {row: [[10 * row + 1, 10 * row + 2]] for row in range(6)}


def step(tables: AscendBlockTables, idx_mapping: torch.Tensor) -> list[list[int]]:
    count = len(idx_mapping)
    starts = torch.arange(count + 1, dtype=torch.int32)
    tables.step(idx_mapping, starts, torch.zeros(count, dtype=torch.int64))
    gathered: list[list[int]] = tables.input_block_tables[0][:, :2].tolist()
    return gathered


def test_rows_that_a_replay_fills_are_cleared_by_the_next_smaller_step(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make_tables([KVCacheGroup(16, 8)], ROWS, max_num_reqs=6)
    tables.warmup()
    backend: Any = tables._backend
    recorded = []
    bind = backend._launch_of

    def recording(*choice: Any) -> Any:
        launch = bind(*choice)

        def record(*arguments: Any) -> None:
            recorded.append((launch, arguments))
            launch(*arguments)

        return record

    captured_idx = torch.tensor([5, 4, 3, 2, 1])
    with monkeypatch.context() as capture:
        capture.setattr(backend, "is_capturing", lambda: True)
        capture.setattr(backend, "_launch_of", recording)
        step(tables, captured_idx)
    ((launch, arguments),) = recorded
    assert step(tables, torch.tensor([0])) == [[1, 2]] + [[0, 0]] * 5
    captured_idx.copy_(torch.tensor([1, 2, 3, 4, 5]))
    launch(*arguments)
    replayed = tables.input_block_tables[0][:, :2].tolist()
    assert replayed == [[10 * row + 1, 10 * row + 2] for row in range(1, 6)] + [[0, 0]]
    assert step(tables, torch.tensor([0])) == [[1, 2]] + [[0, 0]] * 5
    launch(*arguments)
    tables.get_dummy_block_tables(1)
    assert not tables.input_block_tables[0].any()


def test_rows_stay_dirty_while_a_capture_runs_nothing(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make_tables([KVCacheGroup(16, 8)], ROWS, max_num_reqs=6)
    backend: Any = tables._backend
    step(tables, torch.tensor([0, 1, 2, 3, 4, 5]))
    with monkeypatch.context() as capture:
        capture.setattr(backend, "is_capturing", lambda: True)
        capture.setattr(backend, "_launch_of", lambda *_: lambda *_: None)
        step(tables, torch.tensor([0, 1]))
    assert step(tables, torch.tensor([3])) == [[31, 32]] + [[0, 0]] * 5


def test_tables_that_a_capture_names_are_kept(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph reads their addresses whenever it is replayed."""
    monkeypatch.setattr("fused_slots.backends.device.KEPT_OUT_TABLES", 3)
    tables = make_tables([KVCacheGroup(16, 8)], ROWS, max_num_reqs=6)
    backend: Any = tables._backend
    outs = [torch.full((2, 8), 9, dtype=torch.int32) for _ in range(7)]

    def gather(out: torch.Tensor) -> None:
        tables.gather_block_tables(torch.tensor([2]), 1, out=[out])

    gather(outs[0])
    captured = weakref.ref(backend._out_table([outs[0]]))
    with monkeypatch.context() as capture:
        capture.setattr(backend, "is_capturing", lambda: True)
        gather(outs[0])
    for out in outs[1:]:
        gather(out)
    assert captured() is not None
    assert captured() is backend._out_table([outs[0]])
    refused = mock.Mock(side_effect=RuntimeError("refused"))
    monkeypatch.setattr(backend, "refuse_capture", refused)
    gather(outs[0])
    with pytest.raises(RuntimeError, match="refused"):
        gather(torch.full((2, 8), 9, dtype=torch.int32))


def test_tables_of_many_callers_are_not_all_kept(
    make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_slots.backends.device.KEPT_OUT_TABLES", 3)
    tables = make_tables([KVCacheGroup(16, 8)], ROWS, max_num_reqs=6)
    backend: Any = tables._backend
    outs = [torch.full((2, 8), 9, dtype=torch.int32) for _ in range(7)]
    for out in outs:
        tables.gather_block_tables(torch.tensor([2]), 1, out=[out])
        assert len(backend._out_tables) <= 3
    for out in outs:
        assert out.tolist() == [[21, 22, 0, 0, 0, 0, 0, 0], [9] * 8]
