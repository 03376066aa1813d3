"""The real v2 model runner of whichever vLLM is on the path, its constructor replaced.

`initialize_kv_cache` is its own up to the tables, `execute_model` up to the model: requests, input
batch, positions and every call of the tables are the release's. What the constructor would set and
the runner does not need here is None.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import vllm.v1.worker.gpu.model_runner as model_runner
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.states import RequestState

from tests.releases.scheduling import VOCAB_SIZE, Loop

CPU = torch.device("cpu")
MOCKS = (
    *("model_state", "lora_state", "sampler", "prompt_logprobs_worker", "kv_block_zeroer"),
    *("kv_connector", "ec_connector", "jit_warmup_registry"),
)


class TablesBuilt(Exception):
    """Ends `initialize_kv_cache` behind the tables."""


class ModelWouldRun(Exception):
    """Ends `execute_model` where the model would run, with what was prepared for it."""


class BareRunner(model_runner.GPUModelRunner):
    """The runner without its constructor's work."""

    def __init__(self, loop: Loop, kernel_block_sizes: list[int]) -> None:
        scenario, config = loop.scenario, loop.vllm_config
        for name in MOCKS:
            setattr(self, name, MagicMock())
        values = {
            "vllm_config": config,
            "device": CPU,
            "model_config": config.model_config,
            "cache_config": config.cache_config,
            "scheduler_config": config.scheduler_config,
            "parallel_config": config.parallel_config,
            "observability_config": SimpleNamespace(cudagraph_metrics=False),
            "max_model_len": scenario.max_model_len,
            "max_num_reqs": scenario.max_num_reqs,
            "max_num_tokens": scenario.max_num_batched_tokens,
            "vocab_size": VOCAB_SIZE,
            "decode_query_len": 1,
            "kv_caches": [],
            **dict.fromkeys(("dp_size", "dcp_size", "cp_interleave"), 1),
            **dict.fromkeys(("dp_rank", "dcp_rank"), 0),
            **dict.fromkeys(("is_first_pp_rank", "is_last_pp_rank"), True),
            **dict.fromkeys(("is_encoder_decoder", "use_pp", "use_dcp"), False),
        }
        for name, value in values.items():
            if not isinstance(getattr(type(self), name, None), property):
                setattr(self, name, value)
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_num_tokens, CPU)
        self.req_states = RequestState(
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_tokens,
            num_speculative_steps=0,
            vocab_size=VOCAB_SIZE,
            device=CPU,
        )
        self.model_state.num_new_sampled_tokens_per_step = 1
        self.model_state.get_additional_cg_support.return_value = ()
        self.model_state.preprocess_state = self._stop
        self._build_tables(loop, kernel_block_sizes)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def _build_tables(self, loop: Loop, kernel_block_sizes: list[int]) -> None:
        built = []

        def build(*arguments: Any, **keywords: Any) -> None:
            built.append((table_class(*arguments, **keywords), keywords))
            raise TablesBuilt

        table_class = model_runner.BlockTables
        others = {
            "maybe_create_adaptive_verification_manager": MagicMock(),
            "get_max_chunk_logits": MagicMock(),
            "init_attn_backend": lambda *_, **__: ([], MagicMock(), kernel_block_sizes),
        }
        with patch.object(model_runner, "BlockTables", build):
            for name, value in others.items():
                if hasattr(model_runner, name):
                    patch.object(model_runner, name, value).start()
            try:
                self.initialize_kv_cache(loop.kv_cache_config)
            except TablesBuilt:
                pass
            finally:
                patch.stopall()
        ((self.block_tables, self.keywords),) = built

    @staticmethod
    def _stop(input_batch: Any, block_tables: Any, *_: Any) -> None:
        raise ModelWouldRun(input_batch, block_tables)

    def run(self, output: Any) -> tuple[Any, Any] | None:
        """The input batch and the gathered tables of a step; None where it returns early."""
        try:
            self.execute_model(output)
        except ModelWouldRun as stopped:
            batch, gathered = stopped.args
        else:
            return None
        # What the sampler's kernels do behind a model without drafts.
        lengths = torch.from_numpy(batch.num_scheduled_tokens).int()
        self.req_states.num_computed_tokens.gpu[batch.idx_mapping.long()] += lengths
        return batch, gathered


def dispatch(
    manager: Any, num_reqs: int, num_tokens: int, *_: Any, **__: Any
) -> tuple[BatchExecutionDescriptor, None]:
    """No graph, but the padding of one: tokens beyond the batch."""
    return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens + num_tokens % 2, num_reqs), None


def patch_release() -> None:
    """What of the release's modules a CPU has to do another way; for the process's life."""
    model_runner.dispatch_cg_and_sync_dp = dispatch
    if hasattr(model_runner, "copy_kv_cache_blocks_inplace"):
        model_runner.copy_kv_cache_blocks_inplace = lambda *_: None
