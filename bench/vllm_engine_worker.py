"""The process that holds one vLLM engine for `bench.vllm_engine_time`, and measures it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.vllm_engine_watch import measuring

SIDES = ("stock", "plugin")
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "fused_slots",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
LAYERS = {"gemma3_6_groups": (2, 10), "gemma3_16_groups": (1, 15)}
"""Full and sliding layers; vLLM puts as many into each group as there are full ones."""
BATCHES = (1, 8)
"""Requests that decode together."""
MAX_LEN = 8192


def serve(
    connection: Any,
    side: str,
    model: str,
    mode: str,
    stubs: tuple[str, ...],
    log: str,
    batches: tuple[int, ...],
) -> None:
    """Build the engine, then answer requests until None comes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(ENVIRONMENT, FUSED_SLOTS_VLLM="off" if side == "stock" else "strict")
    if stubs:
        sys.meta_path.insert(0, _Stubs(stubs))
    try:
        engine = Engine(model, mode, batches)
        connection.send(("ready", engine.about()))
    except Exception:
        connection.send(("failed", traceback.format_exc(limit=-6)))
        return
    while (request := connection.recv()) is not None:
        try:
            connection.send(("done", engine.run(**request)))
        except Exception:
            connection.send(("failed", traceback.format_exc(limit=-6)))
    connection.send(("done", engine.end()))


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that vLLM imports and these engines never use: every name in them is a class."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})

        module.__path__ = []
        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def write_model(name: str) -> str:
    """A folder with the config of a small Gemma 3; weights are random."""
    from transformers import Gemma3TextConfig

    full, sliding = LAYERS[name]
    each = sliding // full
    config = Gemma3TextConfig(
        num_hidden_layers=full + sliding,
        layer_types=(["sliding_attention"] * each + ["full_attention"]) * full,
        sliding_window=128,
        query_pre_attn_scalar=64,
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
    )
    folder = Path(tempfile.gettempdir(), "vllm_engine_models", f"{name}-{os.getpid()}")
    config.save_pretrained(folder)
    return str(folder)


class Engine:
    """A vLLM engine in this process.

    Args:
        mode: "eager" or a CUDA graph mode of vLLM's, and behind it " synchronous" for a scheduler
            that waits for each step.
        batches: requests that will decode together; they are warmed up.
    """

    def __init__(self, model: str, mode: str, batches: tuple[int, ...]) -> None:
        import torch
        from vllm import LLM

        self.torch = torch
        mode, _, synchronous = mode.partition(" ")
        most = max(32, *batches)
        sizes = [1, 2, 4, 8, 16, 32, 64]
        compiled = {
            "mode": 0,
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": [size for size in sizes if size <= most],
        }
        settings: dict[str, Any] = {"compilation_config": compiled}
        if mode == "eager":
            settings = {"enforce_eager": True}
        if synchronous:
            settings["async_scheduling"] = False
        self.llm = LLM(
            model=write_model(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            max_num_seqs=most,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=1 << 30,
            attention_backend="TRITON_ATTN",
            seed=0,
            disable_log_stats=True,
            **settings,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        for batch in batches:
            self.run("plain", batch, 40)

    def about(self) -> dict[str, Any]:
        """What is measured: the tables' class and groups, the plugin's status."""
        import vllm

        from fused_slots.vllm.plugin import status

        tables = self.runner.block_tables
        return {
            "vllm": vllm.__version__,
            "torch": self.torch.__version__,
            "card": self.torch.cuda.get_device_name(),
            "tables": type(tables).__name__,
            "groups": len(tables.block_sizes),
            "plugin": status().reason,
            "async_scheduling": self.runner.vllm_config.scheduler_config.async_scheduling,
        }

    def end(self) -> dict[str, Any]:
        """Faults that the tables counted."""
        take_faults = getattr(self.runner.block_tables, "take_faults", None)
        return {"faults": [str(fault) for fault in take_faults()] if take_faults else None}

    def run(self, kind: str, batch: int, new_tokens: int) -> dict[str, Any]:
        """Generate `new_tokens` for each of `batch` requests, measured as `kind` says."""
        from vllm import SamplingParams

        lengths = [20 + i % 16 if kind == "decode" else 150 + 5 * i for i in range(batch)]
        prompts = [
            {"prompt_token_ids": [(7 * i + 3 * j) % 4000 + 1 for j in range(length)]}
            for i, length in enumerate(lengths)
        ]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        with measuring(kind, self.runner, batch) as numbers:
            begin = time.perf_counter()
            outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
        result = numbers()
        result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if kind == "plain":
            result["tokens_per_second"] = round(batch * new_tokens / seconds, 2)
        return result
