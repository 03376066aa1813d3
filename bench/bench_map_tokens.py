"""Mapping a flat list of draft tokens."""

from typing import Any

import numpy as np
import torch

from bench.prepared import Prepared


def bench_map_tokens(prepared: Prepared, benchmark: Any) -> None:
    load = prepared.load
    rows = torch.from_numpy(np.repeat(load.idx_mapping, np.diff(load.query_start_loc)))
    positions = prepared.tensors.positions

    def map_tokens() -> Any:
        return prepared.tables.map_tokens(rows, positions)

    prepared.check_slots(map_tokens())
    benchmark(map_tokens)
