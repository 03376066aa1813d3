"""One rank of a decode context parallel group, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK_SIZES, MAX_NUM_BLOCKS = [4, 8], [8, 4]
INTERLEAVES = [1, 2, 4]
LENGTHS = [37, 1, 22]
"""Tokens of each request."""


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Join vLLM's groups over gloo, map every token, write what this rank got."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size, rank, f"file://{folder}/rendezvous", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world_size,
            decode_context_model_parallel_size=world_size,
            backend="gloo",
        )
        found = [map_tokens(interleave) for interleave in INTERLEAVES]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def map_tokens(interleave: int) -> dict[str, Any]:
    """Slots of every request's tokens, by our tables and vLLM's own."""
    import torch
    from vllm.v1.worker import block_table as stock

    from fused_slots.vllm.v1 import MultiGroupBlockTable

    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    found: dict[str, Any] = {}
    for name, table_class in (
        ("ours", MultiGroupBlockTable),
        ("vllm's", stock.MultiGroupBlockTable),
    ):
        tables = table_class(
            max_num_reqs=4,
            max_num_batched_tokens=64,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=BLOCK_SIZES,
            max_num_blocks=MAX_NUM_BLOCKS,
            cp_kv_cache_interleave_size=interleave,
        )
        for row, length in enumerate(LENGTHS):
            counts = [-(-length // (2 * size)) for size in BLOCK_SIZES]
            tables.add_row([[10 * (row + 1) + k for k in range(n)] for n in counts], row)
        tables.commit_block_table(len(LENGTHS))
        tables.compute_slot_mapping(len(LENGTHS), starts, positions)
        found[name] = [table.slot_mapping.gpu.tolist() for table in tables.block_tables]
        found[f"group of {name}"] = [
            (table.dcp_world_size, table.dcp_rank) for table in tables.block_tables
        ]
    return found
