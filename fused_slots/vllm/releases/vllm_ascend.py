"""vllm-ascend's release lines, as read from its published packages; 0.23 is its stable one."""

from __future__ import annotations

from dataclasses import replace

from fused_slots.vllm.releases.contract import Contract, Methods, Runner, Tables
from fused_slots.vllm.releases.vllm import (
    V1_RUNNER,
    VLLM_0_22,
    VLLM_0_26,
    VLLM_0_28,
    VLLM_0_29,
    VLLM_0_30,
)

_COMPRESSED = ("positions_compressed_list", "req_indices_compressed_list")
_V1: Methods = {
    **VLLM_0_22.tables[1].methods,
    "__init__": (
        *("max_num_reqs", "max_model_len", "max_num_batched_tokens", "pin_memory", "device"),
        *("block_sizes", "num_speculative_tokens", "max_num_blocks", "kernel_sizes"),
        *("cp_kv_cache_interleave_size", "kv_cache_groups"),
    ),
    "compute_slot_mapping": ("num_reqs", "query_start_loc", "positions", *_COMPRESSED),
    "compute_slot_mapping_draft": ("req_indices", "positions", *_COMPRESSED),
}
_V1_READ = frozenset(
    {
        *("add_row", "append_row", "clear_row", "move_row", "swap_row", "commit_block_table"),
        *("compute_slot_mapping", "compute_slot_mapping_draft", "block_tables"),
        *("block_table", "slot_mapping", "get_device_tensor", "get_numpy_array"),
    }
)


def _v1(stand_in: str) -> Tables:
    return Tables(
        runner="v1",
        module="vllm_ascend.worker.npu_input_batch",
        name="MultiGroupBlockTable",
        methods=_V1,
        read_outside=_V1_READ,
        stand_in=f"fused_slots.vllm.ascend_v1:{stand_in}",
        builders=("vllm_ascend.worker.npu_input_batch.MultiGroupBlockTable",),
        waits=True,
    )


def _v2(base: Contract) -> Tables:
    return Tables(
        runner="v2",
        module="vllm_ascend.worker.v2.block_table",
        name="AscendBlockTables",
        methods=base.tables[0].methods,
        read_outside=base.tables[0].read_outside,
        stand_in="fused_slots.vllm.v2:FusedAscendBlockTables",
        builders=("vllm.v1.worker.gpu.model_runner.BlockTables",),
        waits=True,
    )


# It derives from vLLM's, and has an `execute_model` of its own.
_V1_RUNNER = Runner("v1", "vllm_ascend.worker.model_runner_v1", "NPUModelRunner", V1_RUNNER)


def _line(
    name: str, base: Contract, vllm: str, releases: tuple[str, ...], *tables: Tables
) -> Contract:
    has_v2 = any(table.runner == "v2" for table in tables)
    return replace(
        base,
        name=f"vllm-ascend {name}",
        releases={"vllm": (vllm,), "vllm-ascend": releases},
        tables=tables,
        runners=(_V1_RUNNER, *base.runners[: int(has_v2)]),
        default_runner="v1; v2 with VLLM_USE_V2_MODEL_RUNNER=1" if has_v2 else "v1, always",
    )


# 0.28 was written for both vllm 0.28 and what became 0.29.
_V2_0_28 = _v2(replace(VLLM_0_28, tables=VLLM_0_29.tables))
_NEWEST = "FusedAscendMultiGroupBlockTable"

CONTRACTS = (
    _line("0.30", VLLM_0_30, "0.30.0", ("0.30.0rc1", "0.30.0rc2"), _v1(_NEWEST), _v2(VLLM_0_30)),
    _line("0.29", VLLM_0_29, "0.29.0", ("0.29.0rc1",), _v1(_NEWEST), _v2(VLLM_0_29)),
    _line("0.28", VLLM_0_28, "0.28.0", ("0.28.0rc1",), _v1("FusedAscendTables028"), _V2_0_28),
    _line(
        *("0.27", VLLM_0_26, "0.27.1", ("0.27.1rc1",)),
        *(_v1("FusedAscendTables027"), _v2(VLLM_0_26)),
    ),
    _line(
        *("0.26", VLLM_0_26, "0.26.0", ("0.26.0rc1",)),
        *(_v1("FusedAscendTables026"), _v2(VLLM_0_26)),
    ),
    _line(
        *("0.25", VLLM_0_22, "0.25.1", ("0.25.1rc1",)),
        *(_v1("FusedAscendTables024"), _v2(VLLM_0_22)),
    ),
    _line("0.24", VLLM_0_22, "0.24.0", ("0.24.0rc1",), _v1("FusedAscendTables024")),
    _line("0.23", VLLM_0_22, "0.23.0", ("0.23.0", "0.23.0.post1"), _v1("FusedAscendTables023")),
)
