"""Pools whose size is told, or told anew, after construction; and ids that are redirected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_slots import AscendBlockTables, BlockTableError, KVCacheGroup
from fused_slots.vllm.deferral import DeferringBlockTables
from fused_slots.vllm.pools import follow_pools
from fused_slots.vllm.v1 import MultiGroupBlockTable

GROUPS = [
    KVCacheGroup(block_size=4, max_num_blocks=8, name="full"),
    KVCacheGroup(block_size=8, max_num_blocks=4, kernel_block_size=4),
]


@pytest.fixture(params=["native", "python"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FUSED_SLOTS_HOST", request.param)
    return DeferringBlockTables.from_groups(GROUPS, max_num_reqs=2, max_num_batched_tokens=16)


def row(tables: AscendBlockTables, g: int, index: int) -> list[int]:
    return tables.block_tables[g].gpu[index, : tables.num_blocks.np[g, index]].tolist()


def test_a_pool_that_shrinks_and_grows_keeps_the_rows(tables: Any) -> None:
    tables.append_block_ids(0, ([9, 3], [7]), overwrite=True)
    tables.apply_staged_writes()
    tables.resize_pools([5, None])
    with pytest.raises(
        BlockTableError, match=r"group 0 \(full\).*in \[0, 4\]; got 5.*num_blocks=5"
    ):
        tables.append_block_ids(0, ([5], [900]), overwrite=False)
    tables.append_block_ids(0, ([4], [900]), overwrite=False)
    tables.apply_staged_writes()
    tables.resize_pools(1000)
    tables.append_block_ids(0, ([999], []), overwrite=False)
    tables.apply_staged_writes()
    assert row(tables, 0, 0) == [9, 3, 4, 999]
    assert row(tables, 1, 0) == [14, 15, 1800, 1801]
    assert tables.check_integrity() is None


def test_a_pool_is_not_resized_under_staged_writes(tables: Any) -> None:
    tables.append_block_ids(1, ([3], [2]), overwrite=True)
    with pytest.raises(BlockTableError, match="no staged writes; got writes of 1 rows"):
        tables.resize_pools(4)
    tables.apply_staged_writes()
    assert row(tables, 0, 1) == [3]


def test_a_pool_beyond_the_slots_is_refused_and_changes_nothing() -> None:
    tables = AscendBlockTables.from_groups(
        GROUPS, max_num_reqs=1, max_num_batched_tokens=4, slot_dtype=torch.int32, num_blocks=9
    )
    with pytest.raises(BlockTableError, match="slot must fit slot_dtype int32"):
        tables.resize_pools(1 << 29)
    with pytest.raises(BlockTableError, match=r"in \[0, 8\]; got 9"):
        tables.append_block_ids(0, ([9], []), overwrite=True)


def test_a_resize_that_fails_changes_nothing(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.resize_pools(5)
    monkeypatch.setenv("FUSED_SLOTS_HOST", "rust")
    with pytest.raises(BlockTableError, match="FUSED_SLOTS_HOST"):
        tables.resize_pools(9)
    with pytest.raises(BlockTableError, match=r"in \[0, 4\]; got 5"):
        tables.write_block_ids(0, [0, 0], ([5], []))
    assert tables.layout.num_blocks == (5, 5)


def test_a_row_given_back_stays_so_when_a_pool_is_resized(tables: Any) -> None:
    """Until the next gather its row is nobody's, whatever is staged for it by then."""
    state = KVCacheGroup(4, 8, prefix_cacheable=False)
    tables = DeferringBlockTables.from_groups([state], max_num_reqs=2, max_num_batched_tokens=4)
    for row in (0, 1):
        tables.append_block_ids(row, ([row + 1],), overwrite=True)
    tables.gather_block_tables(torch.tensor([0, 1]), 2)
    tables.clear_row(0)
    tables.apply_staged_writes()
    tables.resize_pools(9)
    # A request takes the row, and the block of one that has ended since.
    tables.append_block_ids(0, ([2],), overwrite=False)
    tables.apply_staged_writes()
    assert tables.check_integrity() is None


def test_writes_that_wait_are_carried_out_first(tables: Any) -> None:
    with tables.defer_writes():
        tables.append_block_ids(0, ([1], [2]), overwrite=True)
        tables.apply_staged_writes()
        tables.resize_pools(3)
        assert row(tables, 0, 0) == [1]


def test_ids_are_judged_after_they_are_redirected(tables: Any) -> None:
    tables.resize_pools(4)
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(0, ([900, 1], [7]), overwrite=True)
    tables.write_block_ids(0, [1, 1], ([77], []))
    tables.apply_staged_writes()
    assert (row(tables, 0, 0), row(tables, 1, 0)) == ([0, 0], [0, 1])
    for wrong in (([-1], []), ([2**31], []), ([1.5], []), ("12", [])):
        with pytest.raises(BlockTableError):
            tables.append_block_ids(0, wrong, overwrite=True)


def config(num_blocks: int, host: int | None = None, groups: int = 2) -> Any:
    specs = [SimpleNamespace(host_resident=host is not None and g == 1) for g in range(groups)]
    for spec in specs:
        spec.kv_cache_spec = spec
    return SimpleNamespace(
        num_blocks=num_blocks, hisparse_host_num_blocks=host, kv_cache_groups=specs
    )


def test_pools_follow_the_runners_config(tables: Any) -> None:
    follow_pools(tables, None)
    first = config(10)
    follow_pools(tables, first)
    assert tables.layout.num_blocks == (10, 10)
    follow_pools(tables, config(20, host=7))
    assert tables.layout.num_blocks == (20, 7)
    first.num_blocks = 30
    follow_pools(tables, first)
    assert tables.layout.num_blocks == (30, 30)
    layout = tables.layout
    follow_pools(tables, first)
    assert tables.layout is layout
    follow_pools(tables, config(5, groups=3))
    assert tables.layout.num_blocks == (None, None)


def test_while_writes_are_staged_the_next_step_tells_the_pools(tables: Any) -> None:
    tables.append_block_ids(1, ([3], [2]), overwrite=True)
    new = config(10)
    follow_pools(tables, new)
    assert tables.layout.num_blocks == (None, None)
    tables.apply_staged_writes()
    follow_pools(tables, new)
    assert tables.layout.num_blocks == (10, 10)


def test_a_pool_that_cannot_be_mapped_leaves_the_pools_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = AscendBlockTables.from_groups(
        GROUPS, max_num_reqs=1, max_num_batched_tokens=4, slot_dtype=torch.int32, num_blocks=9
    )
    follow_pools(tables, config(1 << 29))
    assert tables.layout.num_blocks == (None, None)
    assert "does not check block ids against the pool" in caplog.text


def test_v1_rows_are_checked_against_the_pool() -> None:
    v1 = MultiGroupBlockTable(2, 16, False, "cpu", [4, 8], [8, 4])
    follow_pools(v1.manager, config(6))
    v1.add_row([[5], [5]], 0)
    with pytest.raises(BlockTableError, match=r"in \[0, 5\]; got 6"):
        v1.append_row([[6], []], 0)
    v1.commit_block_table(1)
    v1.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2]))
    assert v1[0].slot_mapping.gpu[0] == 22
