"""A gather that takes the staged writes before it into its launch, as where vLLM's may not wait."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
import torch

from fused_slots import AscendBlockTables
from fused_slots.backends.base import Backend
from fused_slots.backends.interpreter import InterpreterBackend
from fused_slots.vllm.deferral import DeferringBlockTables
from tests.kernels.ascend_forms import InterpretedAscend
from tests.kernels.checked_memory import CheckedMemory

NUM_ROWS, WIDTHS = 6, (37, 5, 1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("into_out", [False, True])
@pytest.mark.parametrize("backend", [InterpreterBackend, InterpretedAscend])
def test_it_sees_them_and_the_rows_keep_them(
    seed: int,
    into_out: bool,
    backend: type[Backend],
    memory: CheckedMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = Random(seed)
    sizes = ([4, 8, 64], NUM_ROWS, 8, WIDTHS, "cpu")
    options = {"sliding_window_reach": [0, 9, 0], "slot_mapping_enabled": [True, True, False]}
    with mock.patch("fused_slots.block_tables.backend_class", return_value=backend):
        tables = DeferringBlockTables(*sizes, slot_dtype=torch.int32, num_blocks=99, **options)
    tables.warmup()  # whose launches are not the calls'
    monkeypatch.setenv("FUSED_SLOTS_BACKEND", "cpu")
    plain = AscendBlockTables(*sizes, **options)
    for _ in range(8):
        for row in rng.sample(range(NUM_ROWS), 3):
            ids = [[rng.randrange(1, 99) for _ in range(rng.randint(0, w))] for w in WIDTHS]
            for each in (tables, plain):
                each.append_block_ids(row, ids, overwrite=True)
        rows = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
        idx_mapping = torch.tensor(rows, dtype=rng.choice([torch.int32, torch.int64]))
        padded = rng.randint(len(rows), NUM_ROWS)
        computed = None
        if not into_out:
            computed = torch.tensor([rng.randrange(40) for _ in range(NUM_ROWS)]).int()
        outs = []
        for each in (tables, plain):
            out = None
            if into_out:
                out = [torch.full((NUM_ROWS, width), 7).int() for width in WIDTHS]
            launches = memory.launches
            with tables.defer_writes():
                each.apply_staged_writes()
                gathered = each.gather_block_tables(
                    idx_mapping, padded, out=out, num_computed_tokens=computed
                )
            if each is tables:
                assert memory.launches == launches + 1
            outs.append([table.tolist() for table in (*gathered, *each.input_block_tables)])
        assert outs[0] == outs[1]
        for one, other in zip(tables.block_tables, plain.block_tables, strict=True):
            assert torch.equal(one.gpu, other.gpu)
        assert torch.equal(tables.num_blocks.gpu, plain.num_blocks.gpu)
