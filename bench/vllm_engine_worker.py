"""The process that holds one vLLM engine for `bench.vllm_engine_time`, and measures it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

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
SLEEP_CYCLES = 10_000_000
"""About 5 ms on an H200: longer than the host takes to queue a step's preparation."""


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


@contextmanager
def measuring(kind: str, runner: Any, batch: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """What is measured inside the context; call what it gives when the context is left."""
    if kind == "profile":
        with profiling(runner) as numbers:
            yield numbers
    elif kind == "decode":
        with timing_steps(runner, batch) as numbers:
            yield numbers
    elif kind == "plain":
        launches = getattr(runner.block_tables, "launches", None)
        with counting(runner) as steps:

            def counts() -> dict[str, Any]:
                if launches is None:
                    return {"steps": steps.total()}
                return {
                    "steps": steps.total(),
                    "launches": runner.block_tables.launches - launches,
                }

            yield counts
    else:
        watch = Watch(runner, batch, on_device=kind == "device")
        try:
            yield watch.numbers
        finally:
            watch.remove()


@contextmanager
def timing_steps(runner: Any, batch: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Tokens per second over the steps that decode the whole batch, by the host's clock."""
    execute_model = runner.execute_model
    begins: list[float] = []

    def timed(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) == batch:
            begins.append(time.perf_counter())
        return execute_model(output, *args, **kwargs)

    def numbers() -> dict[str, Any]:
        steps = len(begins) - 1
        return {"steps": steps, "tokens_per_second": batch * steps / (begins[-1] - begins[0])}

    runner.execute_model = timed
    try:
        yield numbers
    finally:
        del runner.execute_model


@contextmanager
def counting(runner: Any) -> Iterator[Counter[str]]:
    """Steps with tokens."""
    execute_model = runner.execute_model
    steps: Counter[str] = Counter()

    def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps["steps"] += scheduler_output.total_num_scheduled_tokens > 0
        return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = counted
    try:
        yield steps
    finally:
        del runner.execute_model


class Watch:
    """Wraps methods of one runner and its tables, and notes when each begins and ends.

    Args:
        batch: only steps that schedule one token for each of so many requests count.
        on_device: note CUDA events instead of the host's time.
    """

    PARTS = ("append_block_ids", "apply_staged_writes", "prepare_inputs", "prepare_attn")

    def __init__(self, runner: Any, batch: int, on_device: bool) -> None:
        self._runner, self._batch, self._on_device = runner, batch, on_device
        self._steps: list[dict[str, list[tuple[Any, Any]]]] = []
        self._now: dict[str, list[tuple[Any, Any]]] = {}
        self._begin: Any = None
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(runner, "execute_model", self._step)
        for name in self.PARTS:
            owner = runner.block_tables if hasattr(runner.block_tables, name) else runner
            self._wrap(owner, name, self._part(name))

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(method, *args, **kwargs))
        self._wrapped.append((owner, name))

    def remove(self) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _part(self, name: str) -> Callable[..., Any]:
        def wrapper(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            result = method(*args, **kwargs)
            end = self._mark()
            self._now.setdefault(name, []).append((begin, end))
            if name == "prepare_attn":
                self._now["preparation"] = [(self._begin, end)]
            return result

        return wrapper

    def _step(self, method: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._on_device:
            import torch

            torch.cuda._sleep(SLEEP_CYCLES)
        begin = self._mark()
        if self._begin is not None and not self._on_device:
            self._now["between_steps"] = [(self._begin, begin)]
        self._begin, self._now = begin, {}
        counts = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens == len(counts) == self._batch:
            self._steps.append(self._now)
        return method(output, *args, **kwargs)

    def numbers(self) -> dict[str, Any]:
        """Microseconds of a step: medians over the steps.

        The mean tells more of the block tables: new blocks come only every few steps.
        """
        if self._on_device:
            import torch

            torch.cuda.synchronize()
        steps = [step for step in self._steps if "preparation" in step]
        named: dict[str, Any] = {"steps": len(steps)}
        for name in ("preparation", *self.PARTS, "between_steps"):
            values = [self._sum(step, name) for step in steps]
            if any(values):
                named[f"{name}_us"] = round(statistics.median(values), 2)
        parts = [name for name in self.PARTS if name != "prepare_inputs"]
        values = [sum(self._sum(step, name) for name in parts) for step in steps]
        named["block_tables_us"] = round(statistics.median(values), 2)
        named["block_tables_mean_us"] = round(statistics.fmean(values), 2)
        return named

    def _sum(self, step: dict[str, list[tuple[Any, Any]]], name: str) -> float:
        marks = step.get(name, [])
        if self._on_device:
            return sum(begin.elapsed_time(end) * 1e3 for begin, end in marks)
        return sum((end - begin) * 1e6 for begin, end in marks)


@contextmanager
def profiling(runner: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Kernels and copies per step, by name."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with counting(runner) as steps, torch.profiler.profile(activities=activities) as profile:

        def numbers() -> dict[str, Any]:
            counts: Counter[str] = Counter()
            times: Counter[str] = Counter()
            for event in profile.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    counts[event.name] += 1
                    times[event.name] += event.device_time_total
            total = max(steps.total(), 1)
            return {
                "steps": steps.total(),
                "kernels_and_copies": counts.total() / total,
                "device_us": sum(times.values()) / total,
                "by_name": {
                    name[:80]: [round(counts[name] / total, 2), round(times[name] / total, 2)]
                    for name in counts
                },
            }

        yield numbers
        torch.cuda.synchronize()
