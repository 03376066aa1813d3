"""Our tables with vLLM's own beside them: every call goes to both, every result is compared.

Whoever holds them (vLLM's runner, PCP manager, speculators) needs no change, so what is compared
are the arguments that vLLM really passes. Any release's class will do: it is passed no argument
that the caller does not pass.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import vllm.v1.worker.gpu.block_table as stock_module

from fused_slots import PAD_SLOT_ID
from fused_slots.vllm.v2 import FusedBlockTables


class TwinTables(FusedBlockTables):
    """Where the two differ on purpose, ours is asked for what docs/vllm.md says.

    Attributes:
        compared: numbers of cells, slots, calls by kind, and tokens without a filled column.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With the plug-in in charge, the module's name is ours.
        self.theirs = (FusedBlockTables.stock or stock_module.BlockTables)(*args, **kwargs)
        self.compared: Counter[str] = Counter()
        self._to_compare: Any = None

    def append_block_ids(self, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        super().append_block_ids(req_index, new_block_ids, overwrite)
        self.theirs.append_block_ids(req_index, new_block_ids, overwrite)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.theirs.apply_staged_writes()

    def gather_block_tables(
        self,
        idx_mapping: Any,
        num_reqs_padded: int,
        out: Any = None,
        out_ptrs: Any = None,
        num_computed_tokens: Any = None,
    ) -> Any:
        mine = super().gather_block_tables(
            idx_mapping, num_reqs_padded, out, out_ptrs, num_computed_tokens
        )
        passed = {}
        if out is not None:
            passed["out"] = tuple(torch.zeros_like(table) for table in out)
            addresses = [table.data_ptr() for table in passed["out"]]
            passed["out_ptrs"] = torch.tensor(addresses, dtype=torch.uint64)
        if num_computed_tokens is not None:
            passed["num_computed_tokens"] = num_computed_tokens
        theirs = self.theirs.gather_block_tables(idx_mapping, num_reqs_padded, **passed)
        self.compared["gather into out" if out is not None else "gather"] += 1
        self.compared["gather of all columns"] += num_computed_tokens is None
        self._to_compare = idx_mapping, mine, theirs
        if self._gather_waits is None:
            self._compare_gathered()
        return mine

    def compute_slot_mappings(
        self,
        idx_mapping: Any,
        query_start_loc: Any,
        positions: Any,
        num_tokens_padded: int,
        out: Any = None,
        replay_start: Any = None,
    ) -> Any:
        assert replay_start is None
        mine = super().compute_slot_mappings(
            idx_mapping, query_start_loc, positions, num_tokens_padded, out
        )
        self._compare_gathered()
        their_out = None if out is None else torch.zeros_like(out)
        theirs = self.theirs.compute_slot_mappings(
            *(idx_mapping, query_start_loc, positions, num_tokens_padded),
            **({} if out is None else {"out": their_out}),
        )
        assert mine.shape == theirs.shape
        whole = (self.slot_mappings, self.theirs.slot_mappings) if out is None else (out, their_out)
        self.compared["compute into out" if out is not None else "compute"] += 1
        num_reqs = idx_mapping.shape[0]
        self.compared["longer arrays"] += query_start_loc.shape[
            0
        ] > num_reqs + 1 or positions.shape[0] > int(query_start_loc[num_reqs])
        self._compare_slots(idx_mapping, query_start_loc, positions, *whole)
        return mine

    def get_dummy_slot_mappings(self, num_tokens: int) -> Any:
        self.theirs.get_dummy_slot_mappings(num_tokens)
        return super().get_dummy_slot_mappings(num_tokens)

    def get_dummy_block_tables(self, num_reqs: int) -> Any:
        self.theirs.get_dummy_block_tables(num_reqs)
        return super().get_dummy_block_tables(num_reqs)

    def _compare_gathered(self) -> None:
        if self._to_compare is not None:
            self.compare_tables(*self._to_compare)
            self._to_compare = None

    def compare_tables(self, idx_mapping: Any, ours: Any, theirs: Any) -> None:
        """Filled columns, zero behind them, and zero rows behind the batch."""
        filled = self.theirs.num_blocks.np
        for g, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.shape == their.shape
            for b, row in enumerate(idx_mapping.tolist()):
                end = filled[g, row]
                assert torch.equal(mine[b, :end], their[b, :end]), (g, b)
                assert not mine[b, end:].any(), (g, b)
                self.compared["cells"] += int(end)
            assert not mine[len(idx_mapping) :].any()
            assert not their[len(idx_mapping) :].any()

    def _compare_slots(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, mine: Any, theirs: Any
    ) -> None:
        """Equal where a token's column is filled and behind the last token; else ours is PAD."""
        num_tokens = int(query_start_loc[idx_mapping.shape[0]])
        assert torch.equal(mine[:, num_tokens:], theirs[:, num_tokens:])
        lengths = query_start_loc[: idx_mapping.shape[0] + 1].diff().long()
        rows = torch.repeat_interleave(idx_mapping.long(), lengths)
        enabled = getattr(self.theirs, "_slot_mapping_enabled", [True] * len(self.block_sizes))
        for g, size in enumerate(self.kernel_block_sizes):
            if not enabled[g]:
                assert torch.equal(mine[g], theirs[g])
                continue
            columns = positions[:num_tokens] // size
            filled = torch.from_numpy(self.theirs.num_blocks.np[g])[rows.clamp(min=0)]
            known = (columns < filled) | (rows < 0)
            assert torch.equal(mine[g, :num_tokens][known], theirs[g, :num_tokens][known]), g
            assert (mine[g, :num_tokens][~known] == PAD_SLOT_ID).all(), g
            self.compared["slots"] += int((mine[g, :num_tokens] != PAD_SLOT_ID).sum())
            self.compared["tokens without a block"] += int((~known).sum())
