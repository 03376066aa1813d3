"""vLLM's release lines, newest first, as read from its published packages.

0.21 and older build their v2 tables from `max_model_len` instead of block counts, and have no
contract here.
"""

from __future__ import annotations

from collections.abc import Mapping

from fused_slots.vllm.releases.contract import Contract, Methods, Runner, Tables

PAGED = "paged"
"""The table of such a spec's group holds blocks of tokens."""
STATE = "state"
"""Entries without slots."""
RING = "ring"
"""One block, which tokens overwrite in a circle."""
WRAPPER = "wrapper"
"""What the specs of the group's layers hold, which are of one kind."""

_PAGED = (
    *("FullAttentionSpec", "TQFullAttentionSpec", "MLAAttentionSpec", "HiddenStateCacheSpec"),
    *("SinkFullAttentionSpec", "ChunkedLocalAttentionSpec", "SlidingWindowSpec"),
    *("SlidingWindowMLASpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec"),
)
_SPECS_0_22: Mapping[str, str] = {
    **dict.fromkeys(_PAGED, PAGED),
    "MambaSpec": STATE,
    "UniformTypeKVCacheSpecs": WRAPPER,
}
_SPECS_0_25 = {**_SPECS_0_22, "RSWASpec": PAGED}
_SPECS_0_28 = {name: kind for name, kind in _SPECS_0_25.items() if name != "TQFullAttentionSpec"}
_SPECS_0_29 = {**_SPECS_0_28, "CircularBufferSpec": RING}
_SPECS_0_32 = {**_SPECS_0_29, "HiSparseHotSpec": STATE, "HiSparseResidentSpec": PAGED}
# One block, overwritten in a circle; its indexer works out where.
_SPECS_0_30 = {**_SPECS_0_32, "KpoolTailSpec": RING}

# The v2 runner's tables.

_SIZES = (
    *("block_sizes", "max_num_reqs", "max_num_batched_tokens", "max_num_blocks_per_group"),
    "device",
)
_CONTEXT_PARALLEL = ("cp_size", "cp_rank", "cp_interleave")
_GATHER = ("idx_mapping", "num_reqs_padded")
_COMPUTE = ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded")

_V2: Methods = {
    "__init__": (*_SIZES, "kernel_block_sizes", *_CONTEXT_PARALLEL),
    "init_block_table_layout_tensors": (),
    "append_block_ids": ("req_index", "new_block_ids", "overwrite"),
    "apply_staged_writes": (),
    "gather_block_tables": (*_GATHER, "out", "out_ptrs"),
    "get_dummy_block_tables": ("num_reqs",),
    "compute_slot_mappings": (*_COMPUTE, "out"),
    "get_dummy_slot_mappings": ("num_tokens",),
}
_V2_0_22 = {**_V2, "gather_block_tables": _GATHER, "compute_slot_mappings": _COMPUTE}
_V2_0_29 = {**_V2, "__init__": (*_V2["__init__"], "slot_mapping_enabled")}
_V2_0_31 = {**_V2, "__init__": (*_V2_0_29["__init__"], "dcp_sharded")}
_V2_0_32 = {
    **_V2,
    "__init__": (*_SIZES, *_CONTEXT_PARALLEL, "slot_mapping_enabled", "dcp_sharded"),
}
_V2_0_33 = {
    **_V2,
    "__init__": (*_V2_0_32["__init__"], "sliding_window_reach"),
    "gather_block_tables": (*_V2["gather_block_tables"], "num_computed_tokens"),
}

_V2_READ = frozenset(
    {
        *("append_block_ids", "apply_staged_writes", "gather_block_tables"),
        *("compute_slot_mappings", "get_dummy_block_tables", "get_dummy_slot_mappings"),
        *("block_tables", "input_block_tables", "slot_mappings"),
        *("cp_size", "cp_rank", "cp_interleave"),
    }
)
_AFTER_SLEEP = {"init_block_table_layout_tensors"}
_V2_READ_0_22 = _V2_READ | _AFTER_SLEEP | {"block_sizes", "device"}
_V2_READ_0_29 = _V2_READ | {
    *("num_kv_cache_groups", "kernel_block_sizes", "blocks_per_kv_block", "device")
}
_V2_READ_0_26 = _V2_READ_0_29 | _AFTER_SLEEP
_V2_READ_0_32 = _V2_READ | {
    *("num_kv_cache_groups", "block_sizes", "device", "redirect_writes_to_null_block")
}

# The v1 runner's tables, and those of one group.

_ROWS: Methods = {
    "append_row": ("block_ids", "row_idx"),
    "add_row": ("block_ids", "row_idx"),
    "clear_row": ("row_idx",),
    "move_row": ("src", "tgt"),
    "swap_row": ("src", "tgt"),
    "compute_slot_mapping": ("num_reqs", "query_start_loc", "positions"),
    "commit_block_table": ("num_reqs",),
    "clear": (),
}
_BATCH = ("max_num_batched_tokens", "pin_memory", "device", "block_sizes")
_V1_0_22 = {
    "__init__": (
        *("max_num_reqs", "max_model_len", *_BATCH, "kernel_block_sizes", "max_num_blocks"),
        "cp_kv_cache_interleave_size",
    ),
    **_ROWS,
}
_V1_0_26 = {
    "__init__": (
        *("max_num_reqs", *_BATCH, "kernel_block_sizes", "max_num_blocks"),
        *("cp_kv_cache_interleave_size", "slot_mapping_modes"),
    ),
    **_ROWS,
}
_V1_0_32 = {
    "__init__": (
        *("max_num_reqs", *_BATCH, "max_num_blocks"),
        *("cp_kv_cache_interleave_size", "slot_mapping_modes"),
    ),
    **_ROWS,
}

_V1_READ = frozenset({*_ROWS, "block_tables", "block_table", "slot_mapping", "get_device_tensor"})
_V1_READ_0_26 = _V1_READ | {"blocks_per_kv_block", "max_num_blocks_per_req"}
_V1_READ_0_32 = _V1_READ | {"block_size", "get_numpy_array", "max_num_blocks_per_req"}
_V1_READ_0_28 = _V1_READ_0_32 | {"blocks_per_kv_block"}

# The runners.

V1_RUNNER: Methods = {"execute_model": ("scheduler_output", "intermediate_tensors")}

_EXECUTE = (
    *("scheduler_output", "intermediate_tensors", "dummy_run", "skip_attn_for_dummy_run"),
    "is_profile",
)
_EXECUTE_0_28 = (*_EXECUTE, "context_len")
_EXECUTE_0_30 = (*_EXECUTE_0_28, "valid_dummy_state_slots")
_EXECUTE_0_31 = (*_EXECUTE_0_30, "randomize_inputs")


def _v2(methods: Methods, read_outside: frozenset[str]) -> Tables:
    return Tables(
        runner="v2",
        module="vllm.v1.worker.gpu.block_table",
        name="BlockTables",
        methods=methods,
        read_outside=read_outside,
        stand_in="fused_slots.vllm.v2:FusedBlockTables",
        builders=("vllm.v1.worker.gpu.model_runner.BlockTables",),
    )


def _v1(methods: Methods, read_outside: frozenset[str]) -> Tables:
    return Tables(
        runner="v1",
        module="vllm.v1.worker.block_table",
        name="MultiGroupBlockTable",
        methods=methods,
        read_outside=read_outside,
        stand_in="fused_slots.vllm.v1:MultiGroupBlockTable",
        builders=("vllm.v1.worker.gpu_input_batch.MultiGroupBlockTable",),
    )


def _runners(execute_model: tuple[str, ...]) -> tuple[Runner, ...]:
    methods = {"execute_model": execute_model, "prepare_attn": ("input_batch",)}
    return (
        Runner("v2", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", methods),
        Runner("v1", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", V1_RUNNER),
    )


_NEARLY_ALL = "v2 for every model whose features it supports"

VLLM_0_33 = Contract(
    name="vllm 0.33",
    releases={"vllm": ("0.33.0",)},
    tables=(_v2(_V2_0_33, _V2_READ_0_32), _v1(_V1_0_32, _V1_READ_0_32)),
    runners=_runners(_EXECUTE_0_31),
    spec_kinds=_SPECS_0_32,
    default_runner=_NEARLY_ALL,
)
VLLM_0_32 = Contract(
    name="vllm 0.32",
    releases={"vllm": ("0.32.0",)},
    tables=(_v2(_V2_0_32, _V2_READ_0_32), _v1(_V1_0_32, _V1_READ_0_32)),
    runners=_runners(_EXECUTE_0_31),
    spec_kinds=_SPECS_0_32,
    default_runner=_NEARLY_ALL,
)
VLLM_0_31 = Contract(
    name="vllm 0.31",
    releases={"vllm": ("0.31.0",)},
    tables=(_v2(_V2_0_31, _V2_READ_0_29), _v1(_V1_0_26, _V1_READ_0_28)),
    runners=_runners(_EXECUTE_0_31),
    spec_kinds=_SPECS_0_30,
    default_runner=_NEARLY_ALL,
)
VLLM_0_30 = Contract(
    name="vllm 0.30",
    releases={"vllm": ("0.30.0",)},
    tables=(_v2(_V2_0_29, _V2_READ_0_29), _v1(_V1_0_26, _V1_READ_0_28)),
    runners=_runners(_EXECUTE_0_30),
    spec_kinds=_SPECS_0_30,
    default_runner=_NEARLY_ALL,
)
VLLM_0_29 = Contract(
    name="vllm 0.29",
    releases={"vllm": ("0.29.0",)},
    tables=(_v2(_V2_0_29, _V2_READ_0_29), _v1(_V1_0_26, _V1_READ_0_28)),
    runners=_runners(_EXECUTE_0_28),
    spec_kinds=_SPECS_0_29,
    default_runner=_NEARLY_ALL,
)
VLLM_0_28 = Contract(
    name="vllm 0.28",
    releases={"vllm": ("0.28.0",)},
    tables=(_v2(_V2, _V2_READ_0_26), _v1(_V1_0_26, _V1_READ_0_28)),
    runners=_runners(_EXECUTE_0_28),
    spec_kinds=_SPECS_0_28,
    default_runner="v2 for dense models and some named MoE and hybrid ones, v1 for others",
)
VLLM_0_26 = Contract(
    name="vllm 0.26 and 0.27",
    releases={"vllm": ("0.26.0", "0.27.0", "0.27.1")},
    tables=(_v2(_V2, _V2_READ_0_26), _v1(_V1_0_26, _V1_READ_0_26)),
    runners=_runners(_EXECUTE),
    spec_kinds=_SPECS_0_25,
    default_runner="v2 for dense models and some named MoE and hybrid ones, v1 for others",
)
VLLM_0_22 = Contract(
    name="vllm 0.22 to 0.25",
    releases={"vllm": ("0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1")},
    tables=(_v2(_V2_0_22, _V2_READ_0_22), _v1(_V1_0_22, _V1_READ)),
    runners=_runners(_EXECUTE),
    spec_kinds=_SPECS_0_25,
    default_runner="v1, but for a few architectures; from 0.25 on v2 for dense models",
)

CONTRACTS = (
    *(VLLM_0_33, VLLM_0_32, VLLM_0_31, VLLM_0_30),
    *(VLLM_0_29, VLLM_0_28, VLLM_0_26, VLLM_0_22),
)
