"""A vLLM plugin: the plugin's tables in charge, vLLM's own beside them as the judge of every call.

In each process of an engine every slot and every live gathered column of every call is compared,
those into a caller's `out` too; calls inside a graph capture are only counted. What was found is
kept as JSON in the folder that ENGINE_TWIN names, one file a process.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PAD = -1
EVERY = 20
"""Calls between two writes of the file."""
MOST_DETAILS = 4


def register() -> None:
    """Put the twin in the place of the plugin's class; the second call does nothing."""
    import vllm.v1.worker.gpu.model_runner as model_runner

    from fused_slots.vllm import plugin

    if getattr(model_runner.BlockTables, "is_twin", False):
        return
    plugin.register()
    model_runner.BlockTables = make_twin(model_runner.BlockTables)


class Findings:
    """Counts of this process, and the first differences in detail."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.counts: Counter[str] = Counter()
        self.first: list[list[Any]] = []
        atexit.register(self.save)

    def differ(self, what: str, *details: Any) -> None:
        self.counts[f"{what} that differ"] += 1
        if len(self.first) < MOST_DETAILS:
            self.first.append([what, *details])

    def save(self) -> None:
        from fused_slots.vllm.plugin import status

        self._file.parent.mkdir(parents=True, exist_ok=True)
        said = {"status": status().reason, **self.counts, "first": self.first}
        self._file.write_text(json.dumps(said))


def make_twin(ours: Any) -> Any:
    """A class derived from ours that also asks vLLM's."""
    name = os.environ.get("ENGINE_TWIN_RUN", "run")
    file = Path(os.environ["ENGINE_TWIN"], f"{name}_{os.getpid()}.json")
    return type(ours)("Twin", (_Twin, ours), {"findings": Findings(file)})


_OURS: Any = object
"""Stands for our class, which is the next one behind `_Twin`; it knows vLLM's as `stock`."""


class _Twin(_OURS):  # type: ignore[misc]
    """Asks vLLM's class, too, with every call's arguments."""

    is_twin = True
    findings: Findings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._judge = self.stock(*args, **kwargs)
        self._gathered_by_both: Any = None
        self.findings.counts["tables built"] += 1
        self.findings.save()

    def append_block_ids(self, *args: Any, **kwargs: Any) -> None:
        redirects = self.redirect_writes_to_null_block
        self._judge.redirect_writes_to_null_block = redirects
        self._judge.append_block_ids(*args, **kwargs)
        super().append_block_ids(*args, **kwargs)

    def apply_staged_writes(self) -> None:
        self._judge.apply_staged_writes()
        super().apply_staged_writes()

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
        if self._in_capture():
            return mine
        passed: dict[str, Any] = {}
        if num_computed_tokens is not None:
            passed["num_computed_tokens"] = num_computed_tokens
        if out is not None:
            self.findings.counts["gathers into out"] += 1
            passed["out"] = tuple(torch.zeros_like(table) for table in out)
            passed["out_ptrs"] = torch.tensor(
                [table.data_ptr() for table in passed["out"]],
                dtype=torch.uint64,
                device=idx_mapping.device,
            )
        theirs = self._judge.gather_block_tables(idx_mapping, num_reqs_padded, **passed)
        self._gathered_by_both = idx_mapping.tolist(), mine, theirs
        if out is not None:
            self._compare_rows()
        return mine

    def compute_slot_mappings(
        self,
        idx_mapping: Any,
        query_start_loc: Any,
        positions: Any,
        num_tokens_padded: int,
        out: Any = None,
    ) -> Any:
        arguments = (idx_mapping, query_start_loc, positions, num_tokens_padded)
        mine = super().compute_slot_mappings(*arguments, out)
        if self._in_capture():
            return mine
        if out is None:
            self._judge.compute_slot_mappings(*arguments)
            both = self.slot_mappings, self._judge.slot_mappings
        else:
            self.findings.counts["slots into out"] += 1
            both = out, torch.zeros_like(out)
            self._judge.compute_slot_mappings(*arguments, out=both[1])
        self._compare_slots(*both, positions)
        self._compare_rows()
        return mine

    def _in_capture(self) -> bool:
        captured: bool = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.findings.counts["calls in a capture"] += captured
        return captured

    def _compare_slots(self, mine: Any, theirs: Any, positions: Any) -> None:
        counts = self.findings.counts
        counts["slot calls"] += 1
        counts["slots"] += mine.numel()
        unequal = mine != theirs
        padded = unequal & (mine == PAD)
        wrong = (unequal & ~padded).nonzero().tolist()
        counts["slots that only ours pads"] += int(padded.sum())
        for g, t in wrong:
            self.findings.differ("slots", g, t, int(mine[g, t]), int(theirs[g, t]))
        if wrong or counts["slot calls"] % EVERY == 0:
            self.findings.save()

    def _compare_rows(self) -> None:
        if self._gathered_by_both is None:
            return
        rows, mine, theirs = self._gathered_by_both
        self._gathered_by_both = None
        for g, tables in enumerate(zip(mine, theirs, strict=True)):
            ours_here, theirs_here = (table.cpu() for table in tables)
            for b, row in enumerate(rows):
                end = int(self._judge.num_blocks.np[g, row]) if row >= 0 else 0
                self.findings.counts["rows"] += 1
                same = torch.equal(ours_here[b, :end], theirs_here[b, :end])
                if not same or bool(ours_here[b, end:].any()):
                    self.findings.differ("rows", g, b, row, end, ours_here[b, :30].tolist())
