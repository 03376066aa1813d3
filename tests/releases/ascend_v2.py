"""Stock and fused v2 tables of the vllm-ascend on the path, under vLLM's own v2 runner.

`python -m tests.releases.ascend_v2`, in an environment with the releases' Python files on its path;
prints JSON. vllm-ascend's runner derives from vLLM's and needs operators of the device; the tables
that both build, and every call of them, are the releases'.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

os.environ.update(
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    VLLM_TARGET_DEVICE="cpu",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_PLUGINS="",
    FUSED_SLOTS_VLLM="strict",
)

import torch

from bench.recording.scenarios import Scenario
from tests.releases.ascend_batch import stand_ins


def main() -> None:
    torch_npu = stand_ins()
    # Plain buffers in place of pinned ones; must come before any runner module is imported.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    from fused_slots.vllm import plugin
    from fused_slots.vllm.v2 import FusedAscendBlockTables

    plugin.register()
    from vllm.v1.worker.gpu import model_runner
    from vllm_ascend.worker.v2.block_table import AscendBlockTables

    assert AscendBlockTables is FusedAscendBlockTables
    assert model_runner.BlockTables is FusedAscendBlockTables
    stock: Any = FusedAscendBlockTables.stock
    assert stock.__module__ == "vllm_ascend.worker.v2.block_table"

    from tests.releases.inside.test_lockstep import SCENARIOS
    from tests.releases.v2_runner import patch_release

    patch_release()
    # The asynchronous one, with prefix hits; both would take a minute.
    counts = {scenario.name: run(scenario, stock) for scenario in SCENARIOS[1:]}
    report = {"contract": plugin.status().contract, "counts": counts}
    print(json.dumps(report | {"torch_npu": sorted(set(torch_npu.asked_for))}))


def run(scenario: Scenario, stock: Any) -> Counter[str]:
    """All steps of a scenario; what was compared."""
    from vllm.v1.worker.gpu import model_runner

    from fused_slots.vllm.v2 import FusedAscendBlockTables
    from tests.releases.inside.test_lockstep import Truth
    from tests.releases.scheduling import Loop
    from tests.releases.v2_runner import BareRunner
    from tests.vllm.twin import TwinTables

    class AscendTwin(TwinTables, FusedAscendBlockTables):
        """Ours beside vllm-ascend's own."""

        def __init__(self, **arguments: Any) -> None:
            FusedAscendBlockTables.__init__(self, **arguments)
            self.theirs = stock(**arguments)
            self.compared = Counter()
            self._to_compare = None

    loop = Loop(scenario)
    truth = Truth(loop)
    ours, model_runner.BlockTables = model_runner.BlockTables, AscendTwin
    try:
        AscendTwin.stock = None
        runner = BareRunner(loop, truth.kernel_block_sizes)
    finally:
        model_runner.BlockTables = ours
    tables = runner.block_tables
    assert truth.splits
    assert tables.slot_mappings.dtype is torch.int32
    for scheduled in loop.run():
        launches = tables.launches
        prepared = runner.run(scheduled.output)
        if prepared is not None:
            assert tables.launches == launches + 1
            truth.check(scheduled, *prepared, tables.slot_mappings)
    assert min(loop.counts["preempted"], loop.counts["resumed"]), loop.counts
    told = {name: loop.counts[name] for name in ("steps", "preempted", "prefix hits")}
    return tables.compared + Counter(told) + Counter({"slots of the manager": truth.num_slots})


if __name__ == "__main__":
    main()
