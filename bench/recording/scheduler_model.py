"""The model, the scheduler and the requests of a scenario, as vLLM's own objects."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.recording.scenarios import Layers, Scenario
from fused_slots.groups import KVCacheGroup
from fused_slots.vllm.config import groups_from_kv_cache_config

_VOCAB_SIZE = 32000
_HEAD_SIZE = 128
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 1 << 20,
}


def build_scheduler(scenario: Scenario) -> Scheduler:
    """vLLM's scheduler for the scenario's model, with layers grouped by vLLM."""
    vllm_config = _vllm_config(scenario)
    kv_cache_config = _kv_cache_config(scenario, vllm_config)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler_class = AsyncScheduler if scenario.asynchronous else Scheduler
    return scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def _vllm_config(scenario: Scenario) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model_config = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            max_model_len=scenario.max_model_len,
            dtype="bfloat16",
        )
        parallel_config = ParallelConfig()
        speculative_config = None
        if scenario.draft_tokens:
            # A drafter that needs no draft model and may run under async scheduling.
            speculative_config = SpeculativeConfig(
                method="ngram_gpu",
                num_speculative_tokens=scenario.draft_tokens,
                target_model_config=model_config,
                target_parallel_config=parallel_config,
            )
        vllm_config = VllmConfig(
            model_config=model_config,
            parallel_config=parallel_config,
            speculative_config=speculative_config,
            device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(
                block_size=scenario.block_size,
                num_gpu_blocks_override=scenario.num_blocks,
                enable_prefix_caching=scenario.prefix_caching,
                mamba_cache_mode="align" if scenario.prefix_caching else "none",
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=scenario.max_model_len,
                is_encoder_decoder=False,
                max_num_seqs=scenario.max_num_reqs,
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                enable_chunked_prefill=True,
            ),
        )
    # vLLM turns it off on a CPU platform; the scheduler itself does not depend on the platform.
    vllm_config.scheduler_config.async_scheduling = scenario.asynchronous
    return vllm_config


def _kv_cache_config(scenario: Scenario, vllm_config: VllmConfig) -> KVCacheConfig:
    specs = {
        f"model.layers.{i}.{layers.kind}.{j}": _layer_spec(scenario, layers)
        for i, layers in enumerate(scenario.layers)
        for j in range(layers.num_layers)
    }
    layouts = [["LBNHC", "LBHNC", "BLNHC", "BLHNC"]]
    resolve_kv_cache_layout(vllm_config, layouts, list(specs.values()))
    groups = get_global_kv_cache_groups(vllm_config, [specs])
    memory = 1 << 50  # num_gpu_blocks_override decides, not the memory
    config = generate_scheduler_kv_cache_config(
        get_kv_cache_configs(vllm_config, [specs], [memory], groups)
    )
    # As the engine core does it before it builds the scheduler.
    vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    vllm_config.cache_config.block_size = min(
        group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if group.kv_cache_spec.prefix_cacheable
    )
    return config


def _layer_spec(scenario: Scenario, layers: Layers) -> KVCacheSpec:
    attention: dict[str, Any] = {
        "num_kv_heads": layers.num_kv_heads,
        "head_size": _HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    if layers.kind == "full":
        return FullAttentionSpec(block_size=scenario.block_size, **attention)
    if layers.kind == "sliding":
        return SlidingWindowSpec(
            block_size=scenario.block_size, sliding_window=layers.window, **attention
        )
    page_size = scenario.block_size * layers.num_kv_heads * _HEAD_SIZE * 4
    if layers.kind == "ring":
        return CircularBufferSpec(
            block_size=layers.ring_size, page_size_padded=page_size, **attention
        )
    return MambaSpec(
        block_size=scenario.block_size if scenario.prefix_caching else scenario.max_model_len,
        shapes=((page_size // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if scenario.prefix_caching else "none",
        num_speculative_blocks=scenario.draft_tokens,
    )


def groups_of(scheduler: Scheduler) -> tuple[KVCacheGroup, ...]:
    """The scheduler's KV cache groups in this package's words, named by kind and number."""
    config = scheduler.kv_cache_config
    groups = groups_from_kv_cache_config(config, scheduler.vllm_config)
    kinds = [group.layer_names[0].split(".")[3] for group in config.kv_cache_groups]
    return tuple(
        replace(group, name=f"{kind} {index}")
        for index, (group, kind) in enumerate(zip(groups, kinds, strict=True))
    )


class Traffic:
    """Requests of one scenario, from its seed."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler) -> None:
        self._scenario = scenario
        self._hasher = None
        if scenario.prefix_caching:
            hash_function = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(scheduler.hash_block_size, hash_function)
        self._random = np.random.default_rng(scenario.seed)
        self._prefixes = [self.tokens(length) for length in scenario.shared_prefixes]
        self._past: deque[list[int]] = deque(maxlen=16)
        self._num_requests = 0

    def arrivals(self, num_waiting: int) -> list[Request]:
        """New requests of this step; none while enough are waiting."""
        if self._num_requests == 0:
            count = self._scenario.max_num_reqs // 2
        else:
            count = int(self._random.poisson(self._scenario.arrivals_per_step))
        if num_waiting > self._scenario.max_num_reqs:
            count = 0
        return [self._request() for _ in range(count)]

    def finished(self, tokens: list[int]) -> None:
        """Remember a conversation that a later prompt may continue."""
        self._past.append(tokens)

    def _request(self) -> Request:
        scenario, random = self._scenario, self._random
        prompt = self.tokens(self._length(scenario.prompt_tokens))
        if self._past and self._prefixes and random.random() < 0.2:
            prompt = self._past[int(random.integers(len(self._past)))] + prompt[:200]
        elif self._prefixes and random.random() < 0.75:
            prompt = self._prefixes[int(random.integers(len(self._prefixes)))] + prompt
        output = self._length(scenario.output_tokens)
        prompt = prompt[: scenario.max_model_len - output - scenario.draft_tokens - 1]
        self._num_requests += 1
        return Request(
            request_id=str(self._num_requests - 1),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            arrival_time=float(self._num_requests),
            block_hasher=self._hasher,
        )

    def _length(self, bounds: tuple[int, int]) -> int:
        low, high = np.log(bounds)
        return int(np.exp(self._random.uniform(low, high)))

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [int(token) for token in self._random.integers(1, _VOCAB_SIZE, count)]
