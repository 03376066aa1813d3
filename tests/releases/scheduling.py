"""The real scheduler of whichever vLLM is on the path, under traffic that a seed decides.

Who runs a batch (a model runner, an input batch) stands outside: the loop hands out what was
scheduled, with the blocks that the KV cache manager then holds, and goes on with random tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
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
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.recording.scenarios import Layers, Scenario

VOCAB_SIZE = 32000
HEAD_SIZE = 128
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 20,
}
MAX_IDLE = 100
"""Schedules without a token before the traffic counts as dry."""


@dataclass(frozen=True)
class Scheduled:
    """One call of `schedule`.

    Attributes:
        output: vLLM's SchedulerOutput.
        num_computed: per request with tokens, those before its first scheduled one.
        held: per such request and group, its allocation blocks in the manager.
    """

    output: Any
    num_computed: dict[str, int]
    held: dict[str, tuple[list[int], ...]]


class Loop:
    """Runs a scenario; `counts` says what happened in it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.vllm_config = build_config(scenario)
        self.kv_cache_config = group_layers(scenario, self.vllm_config)
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(self.kv_cache_config, self.vllm_config)
        name = "AsyncScheduler" if scenario.asynchronous else "Scheduler"
        module = f"vllm.v1.core.sched.{'async_' * scenario.asynchronous}scheduler"
        self.scheduler = getattr(import_module(module), name)(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
        )
        self.counts: Counter[str] = Counter()
        self._random = np.random.default_rng(scenario.seed)
        self._hasher = make_hasher(self.scheduler.cache_config, sizes[1])
        self._prefixes = [self._tokens(length) for length in scenario.shared_prefixes]
        self._requests: dict[str, Any] = {}
        self._computed: dict[str, int] = {}

    @property
    def specs(self) -> list[Any]:
        """The spec of each KV cache group."""
        return [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]

    def run(self) -> Iterator[Scheduled]:
        """Every call of `schedule`, those without tokens too, until the steps are done."""
        in_flight: deque[tuple[Any, Any]] = deque()
        idle = 0
        while self.counts["steps"] < self.scenario.num_steps:
            self._add_requests()
            output = self.scheduler.schedule()
            self._follow(output)
            scheduled = list(output.num_scheduled_tokens)
            manager = self.scheduler.kv_cache_manager
            yield Scheduled(
                output,
                {request: self._computed[request] for request in scheduled},
                {request: manager.get_block_ids(request) for request in scheduled},
            )
            self.counts["steps"] += bool(scheduled)
            idle = 0 if scheduled else idle + 1
            assert idle < MAX_IDLE, (self.counts, "the traffic ran dry")
            in_flight.append((output, self._sample(output)))
            while len(in_flight) > self.scenario.asynchronous:
                self.scheduler.update_from_output(*in_flight.popleft())

    def _add_requests(self) -> None:
        scenario = self.scenario
        count = int(self._random.poisson(scenario.arrivals_per_step))
        if not self._requests:
            count = scenario.max_num_reqs // 2
        if len(self.scheduler.waiting) > scenario.max_num_reqs:
            count = 0
        for _ in range(count):
            prompt = self._tokens(self._random.integers(*scenario.prompt_tokens))
            if self._prefixes and self._random.random() < 0.75:
                prompt = self._prefixes[self._random.integers(len(self._prefixes))] + prompt
            output = int(self._random.integers(*scenario.output_tokens))
            request = Request(
                request_id=str(len(self._requests)),
                prompt_token_ids=prompt[: scenario.max_model_len - output - 1],
                sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                arrival_time=float(len(self._requests)),
                block_hasher=self._hasher if scenario.prefix_caching else None,
            )
            self._requests[request.request_id] = request
            self.scheduler.add_request(request)

    def _follow(self, output: Any) -> None:
        """Count what happened, and remember how far each request is."""
        self.counts["finished"] += len(output.finished_req_ids)
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            resumed = self._requests[new.req_id].num_preemptions > 0
            self.counts["resumed"] += resumed
            self.counts["prefix hits"] += new.num_computed_tokens > 0
        cached = output.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.counts["resumed"] += request in cached.resumed_req_ids
            self.counts["grown"] += self._computed[request] != computed
            self._computed[request] = computed

    def _sample(self, output: Any) -> Any:
        """Random tokens in place of the model's."""
        requests = list(output.num_scheduled_tokens)
        sampled = []
        for request in requests:
            end = self._computed[request] + output.num_scheduled_tokens[request]
            self.counts["tokens"] += output.num_scheduled_tokens[request]
            whole = end >= self._requests[request].num_prompt_tokens
            self.counts["chunks"] += not whole
            self._computed[request] = end
            known = self._requests[request].num_tokens
            sampled.append(self._tokens(1) if end >= known else [])
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=sampled,
        )

    def _tokens(self, count: Any) -> list[int]:
        return [int(token) for token in self._random.integers(1, VOCAB_SIZE, count)]


def make_hasher(cache_config: Any, hash_block_size: int) -> Any:
    function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(hash_block_size, function)


def build_config(scenario: Scenario) -> VllmConfig:
    """A configuration for a model that only its config.json describes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = VllmConfig(
            model_config=ModelConfig(
                model=folder,
                tokenizer=folder,
                skip_tokenizer_init=True,
                max_model_len=scenario.max_model_len,
                dtype="bfloat16",
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(
                block_size=scenario.block_size,
                num_gpu_blocks_override=scenario.num_blocks,
                enable_prefix_caching=scenario.prefix_caching,
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=scenario.max_model_len,
                is_encoder_decoder=False,
                max_num_seqs=scenario.max_num_reqs,
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                enable_chunked_prefill=True,
            ),
        )
    # vLLM decides these by the platform; the scheduler itself does not depend on it.
    config.scheduler_config.async_scheduling = scenario.asynchronous
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.mamba_cache_mode = "align" if scenario.prefix_caching else "none"
    return config


def group_layers(scenario: Scenario, vllm_config: VllmConfig) -> Any:
    """The scheduler's KV cache config; which layers share a table is vLLM's decision."""
    specs = {
        f"model.layers.{i}.{layers.kind}.{j}": layer_spec(scenario, layers)
        for i, layers in enumerate(scenario.layers)
        for j in range(layers.num_layers)
    }
    utils = import_module("vllm.v1.attention.backends.utils")
    if hasattr(utils, "resolve_kv_cache_layout"):  # from 0.29 on
        layouts = [["LBNHC", "LBHNC", "BLNHC", "BLHNC"]]
        utils.resolve_kv_cache_layout(vllm_config, layouts, list(specs.values()))
    memory = [1 << 50]  # num_gpu_blocks_override decides, not the memory
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        configs = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], memory)
    else:  # 0.33 groups first
        planning = import_module("vllm.v1.core.kv_cache_planning")
        groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
        configs = planning.get_kv_cache_configs(vllm_config, [specs], memory, groups)
    config = kv_cache_utils.generate_scheduler_kv_cache_config(configs)
    # As the engine core does it before it builds the scheduler.
    vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    vllm_config.cache_config.block_size = min(
        group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if getattr(group.kv_cache_spec, "prefix_cacheable", True)
    )
    return config


def layer_spec(scenario: Scenario, layers: Layers) -> Any:
    attention: dict[str, Any] = {
        "num_kv_heads": layers.num_kv_heads,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    if layers.kind == "full":
        return interface.FullAttentionSpec(block_size=scenario.block_size, **attention)
    if layers.kind == "sliding":
        return interface.SlidingWindowSpec(
            block_size=scenario.block_size, sliding_window=layers.window, **attention
        )
    page_size = scenario.block_size * layers.num_kv_heads * HEAD_SIZE * 4
    return interface.MambaSpec(
        block_size=scenario.block_size if scenario.prefix_caching else scenario.max_model_len,
        shapes=((page_size // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if scenario.prefix_caching else "none",
    )
