"""vllm-ascend's release lines, as read from its published packages."""

from __future__ import annotations

from dataclasses import replace

from fused_slots.vllm.releases.contract import Tables
from fused_slots.vllm.releases.vllm import VLLM_0_30

_V2 = Tables(
    runner="v2",
    module="vllm_ascend.worker.v2.block_table",
    name="AscendBlockTables",
    methods=VLLM_0_30.tables[0].methods,
    read_outside=VLLM_0_30.tables[0].read_outside,
    stand_in="fused_slots.vllm.v2:FusedAscendBlockTables",
    builders=("vllm.v1.worker.gpu.model_runner.BlockTables",),
)

CONTRACTS = (
    replace(
        VLLM_0_30,
        name="vllm-ascend 0.30",
        releases={"vllm": ("0.30.0",), "vllm-ascend": ("0.30.0rc2",)},
        tables=(_V2,),
        default_runner="v1; v2 with VLLM_USE_V2_MODEL_RUNNER=1",
    ),
)
