"""The soak of bench/soak.py passes on a short life, and goes red when something is broken."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from bench import soak
from bench.soak import Record, grown
from bench.soak_life import KINDS
from bench.soak_manager import Mismatch, Soaked
from bench.soak_oracle import columns_below_window, deal_tokens
from bench.soak_plan import WORLDS, World
from fused_slots import AscendBlockTables, reference
from fused_slots.backends.cpu import CpuBackend
from fused_slots.backends.gpu import KEPT_PLANS
from fused_slots.plan import TokenPlan

STEPS = 150


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_a_short_life_shows_what_the_oracle_expects(world: World) -> None:
    soaked = Soaked(world, 3, "cpu")
    soaked.run(STEPS)
    assert set(soaked.kinds) == set(KINDS)
    assert soaked.compared > STEPS * world.capacity
    assert soaked.faults["column_out_of_row"]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_dealing_tokens_out_agrees_with_the_formula(world: World) -> None:
    for g, group in enumerate(world.groups):
        row = range(1, group.row_width + 1)
        columns, offsets = deal_tokens(world, g)
        below = columns_below_window(world, g)
        for position in range(world.max_len):
            slot = reference.map_token(group, row, position, world.context_parallel).slot
            column = int(columns[position])
            dealt = (column + 1) * group.tokens_per_column + int(offsets[position])
            assert slot == (dealt if column >= 0 else -1)
            kept = reference.gathered_row(
                group, row, len(row), position, context_parallel=world.context_parallel
            )
            assert kept.count(0) == below[position]


def stale_row(backend: Any, staged: Any) -> None:
    """The last cell that a step writes is lost."""
    cells = staged.collect().destinations(backend.layout)
    before = backend._arena[cells[-1:]]
    apply_writes(backend, staged)
    backend._arena[cells[-1:]] = before


def off_by_one(backend: Any, step: Any) -> None:
    """Every gathered row is the next one's."""
    following = (step.idx_mapping + 1) % backend.layout.max_num_reqs
    gather(backend, step._replace(idx_mapping=following))


def dirty_rows(backend: Any, step: Any) -> None:
    """Rows of a larger batch before stay as they are."""
    backend._dirty_rows = 0
    gather(backend, step)


def unpadded(
    backend: Any, rows: Any, positions: Any, replayed: Any, out: Any, *rest: Any
) -> None:
    """The last slot of the tail keeps what was there."""
    last = out[:, -1].copy()
    map_tokens(backend, rows, positions, replayed, out, *rest)
    if len(positions) < out.shape[1]:
        out[:, -1] = last * 0


def replay_written(
    backend: Any, rows: Any, positions: Any, replayed: Any, out: Any, *rest: Any
) -> None:
    """Replayed tokens are written."""
    map_tokens(backend, rows, positions, None, out, *rest)


def uncounted(backend: Any) -> list[Any]:
    """The last fault is lost."""
    return take_faults(backend)[:-1]


apply_writes, gather = CpuBackend.apply_writes, CpuBackend.gather
map_tokens, take_faults = CpuBackend._map, CpuBackend.take_faults


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("apply_writes", stale_row),
        ("gather", off_by_one),
        ("gather", dirty_rows),
        ("_map", unpadded),
        ("_map", replay_written),
        ("take_faults", uncounted),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_backend_is_found(
    method: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, method, broken)
    with pytest.raises(Mismatch, match="mixed groups, steps 0 to"):
        Soaked(WORLDS[0], 3, "cpu").run(STEPS)


def test_a_run_reports_what_it_did_and_fails_when_something_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "CHUNK", 10)
    arguments = ["soak", "--device", "cpu", "--steps", "120", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert soak.main() == 0
    report = json.loads(path.read_text())
    assert (report["steps"], report["failures"]) == (120, [])
    assert [record["steps"] for record in report["processes"][0]["records"]] == [30, 60, 90, 120]

    leak: list[int] = []
    append = AscendBlockTables.append_block_ids

    def leaking(tables: AscendBlockTables, *arguments: Any, **named: Any) -> None:
        vars(tables).setdefault("leak", leak).append(0)
        append(tables, *arguments, **named)

    monkeypatch.setattr(AscendBlockTables, "append_block_ids", leaking)
    assert soak.main() == 1
    assert "kept grew by" in json.loads(path.read_text())["failures"][0]


def test_token_plans_that_are_never_forgotten_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "CHUNK", 10)
    monkeypatch.setattr(sys, "argv", ["soak", "--device", "cpu", "--steps", "120"])
    plan = lru_cache(maxsize=None)(lambda number: TokenPlan(False, 0, 0, 1, number))
    assert all(plan(number) for number in range(KEPT_PLANS))
    monkeypatch.setattr(CpuBackend, "_plan_tokens", plan, raising=False)
    assert soak.main() == 0, "as many as each manager may keep, and they are not growth"
    assert plan(KEPT_PLANS)
    assert soak.main() == 1
    assert f"{3 * (KEPT_PLANS + 1)} token plans" in capsys.readouterr().out


def test_growth_is_what_the_rest_exceeds_the_first_tenth_by() -> None:
    record = Record(1000, 50, 10, 5, 2, 7, 3, 0, 100.0)
    records = [record, replace(record, rss_kib=60)] + [record] * 17 + [replace(record, rss_kib=85)]
    assert grown(records)["rss_kib"] == 25
    assert grown([record] * 20)["rss_kib"] == 0
