"""A worker class for vLLM's own worker wrapper: it notes what its process has plugged in.

Named by `worker_cls`, which vLLM resolves after it has loaded the plugins of the process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fused_slots.vllm.plugin import status


class NotingWorker:
    """Writes its findings to the file that NOTES names."""

    def __init__(self, **_: Any) -> None:
        # As in an engine: the runners are imported when the plugins have been loaded.
        from vllm.v1.worker import gpu_input_batch
        from vllm.v1.worker.gpu import model_runner

        found = {
            "active": status().active,
            "v2": model_runner.BlockTables.__module__,
            "v1": gpu_input_batch.MultiGroupBlockTable.__module__,
        }
        Path(os.environ["NOTES"]).write_text(json.dumps(found))


def init_worker() -> None:
    """What an executor runs in a worker's process, with vLLM's wrapper."""
    from unittest.mock import MagicMock

    from vllm.v1.worker.worker_base import WorkerWrapperBase

    config = MagicMock()
    config.parallel_config.worker_cls = "tests.vllm.loaded_worker.NotingWorker"
    config.parallel_config.worker_extension_cls = ""
    config.model_config.supports_multimodal_inputs = False
    WorkerWrapperBase().init_worker([{"vllm_config": config}])
