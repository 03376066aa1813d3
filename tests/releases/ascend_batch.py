"""vllm-ascend's real `NPUInputBatch`, and its v1 tables, on a machine without an NPU.

What stands in for something else, all of it here: a `torch_npu` module without a single name,
which counts who asks for one; the packages `vllm_ascend.ops` and `vllm_ascend.ops.triton` without
their `__init__` (which import every operator); groups of one rank for context parallelism, which
vllm-ascend takes for granted; `Tensor.pin_memory`, which gives the tensor itself. vLLM, its
scheduler, its KV cache manager, `NPUInputBatch`, the stock tables and their kernels are the
releases' own; the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
UNRUN_PACKAGES = ("vllm_ascend.ops", "vllm_ascend.ops.triton")


class NamelessModule(ModuleType):
    """A module whose every name is missing; `asked_for` remembers which were wanted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.asked_for: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.asked_for.append(name)
        raise AttributeError(f"{self.__name__} is not installed: it has no {name}")


def stand_ins() -> NamelessModule:
    """Put everything in place that an Ascend machine would have; before vllm_ascend is imported."""
    torch_npu = sys.modules["torch_npu"] = NamelessModule("torch_npu")
    found = find_spec("vllm_ascend")
    assert found is not None
    assert found.submodule_search_locations
    root = Path(found.submodule_search_locations[0]).parent
    for name in UNRUN_PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
    set_ranks(1, 0)
    return torch_npu


def set_ranks(dcp_size: int, dcp_rank: int, pcp_size: int = 1) -> None:
    """Context parallel groups of so many ranks."""
    from vllm.distributed import parallel_state

    for name, size, rank in (("_DCP", dcp_size, dcp_rank), ("_PCP", pcp_size, 0)):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, SimpleNamespace(world_size=size, rank_in_group=rank))


class Batch:
    """The persistent batch, changed as the v1 runner changes it from a scheduler's output."""

    def __init__(self, loop: Any, table_class: Any, kernel_sizes: list[list[int]]) -> None:
        from vllm_ascend.worker import npu_input_batch

        named = npu_input_batch.MultiGroupBlockTable
        npu_input_batch.MultiGroupBlockTable = table_class
        try:
            scenario = loop.scenario
            self.batch = npu_input_batch.NPUInputBatch(
                max_num_reqs=scenario.max_num_reqs,
                max_model_len=scenario.max_model_len,
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                device=CPU,
                pin_memory=False,
                vocab_size=32000,
                block_sizes=[spec.block_size for spec in loop.specs],
                kernel_block_sizes=kernel_sizes,
                max_num_blocks_per_req=[blocks_of_a_row(loop, spec) for spec in loop.specs],
                num_speculative_tokens=3,
                kv_cache_groups=loop.kv_cache_config.kv_cache_groups,
            )
        finally:
            npu_input_batch.MultiGroupBlockTable = named
        self.tables: Any = self.batch.block_table
        self._states: dict[str, Any] = {}

    def update(self, output: Any) -> None:
        """What finished, was preempted or waits leaves; what is new or comes back enters."""
        batch, cached = self.batch, output.scheduled_cached_reqs
        for request in output.finished_req_ids:
            self._states.pop(request, None)
        stays = output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for request in [r for r in batch.req_ids if r not in stays]:
            batch.remove_request(request)
        entering = [self._new_state(new) for new in output.scheduled_new_reqs]
        for request, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states[request]
            state.num_computed_tokens = computed
            if request in cached.resumed_req_ids:
                state.block_ids = tuple(map(list, ids))
            elif ids is not None:
                for held, new in zip(state.block_ids, ids, strict=True):
                    held.extend(new)
            row = batch.req_id_to_index.get(request)
            if row is None:
                entering.append(state)
            elif ids is not None:
                batch.block_table.append_row(ids, row)
        for state in entering:
            batch.add_request(state)
        batch.condense()
        batch.refresh_metadata()

    def _new_state(self, new: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        self._states[new.req_id] = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=list(new.prompt_token_ids),
            mm_features=[],
            sampling_params=SamplingParams(),
            generator=None,
            block_ids=tuple(map(list, new.block_ids)),
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=[],
        )
        return self._states[new.req_id]


def blocks_of_a_row(loop: Any, spec: Any) -> int:
    """As vllm-ascend's runner counts them."""
    longest = loop.scenario.max_model_len
    if hasattr(spec, "max_num_blocks_per_req"):
        return int(spec.max_num_blocks_per_req(loop.vllm_config, longest))
    blocks = -(-longest // spec.block_size)
    return blocks + getattr(spec, "num_speculative_blocks", 0)


def is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"
