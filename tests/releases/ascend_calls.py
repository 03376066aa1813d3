"""The calls that an input batch makes of its v1 tables, noted for another environment to repeat.

tests/ascend/repeat_v1_calls.py repeats them on the code compiled for Ascend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

CALLS = (
    *("add_row", "append_row", "clear_row", "move_row", "swap_row", "commit_block_table"),
    *("compute_slot_mapping", "compute_slot_mapping_draft"),
)


class NotedTables:
    """A set of tables as a runner sees it; every call is noted, with the slots that it gave."""

    def __init__(self, table_class: Any, **arguments: Any) -> None:
        self._tables = table_class(**arguments)
        specs = [type(group.kv_cache_spec).__name__ for group in arguments.pop("kv_cache_groups")]
        named = {name: value for name, value in arguments.items() if name != "device"}
        self.notes: list[Any] = [table_class.__name__, specs, plain(named)]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tables, name)
        if name not in CALLS:
            return found

        def call(*arguments: Any) -> None:
            found(*arguments)
            slots = []
            if name.startswith("compute"):
                slots = [table.slot_mapping.gpu.tolist() for table in self._tables.block_tables]
            self.notes.append([name, plain(arguments), slots])

        return call

    def __getitem__(self, g: int) -> Any:
        return self._tables[g]

    def write(self, path: Path) -> None:
        """All notes as JSON."""
        path.write_text(json.dumps(self.notes))


def plain(value: Any) -> Any:
    """Tensors, arrays and what holds them, as JSON has them."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    return value
