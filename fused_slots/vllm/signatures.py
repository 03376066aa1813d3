"""The vLLM this package fits: its version, and the signatures that its own code relies on.

vLLM renames and adds constructor arguments from release to release, so the plugin looks before it
replaces anything, and names what does not fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from fused_slots.faults import BlockTableError

VLLM_VERSION = "0.33.0"

_V2_SIZES = (
    "block_sizes",
    "max_num_reqs",
    "max_num_batched_tokens",
    "max_num_blocks_per_group",
    "device",
)
_V2_CONTEXT_PARALLEL = ("cp_size", "cp_rank", "cp_interleave")

BLOCK_TABLES: Mapping[str, tuple[str, ...]] = {
    "__init__": (
        *_V2_SIZES,
        *_V2_CONTEXT_PARALLEL,
        "slot_mapping_enabled",
        "dcp_sharded",
        "sliding_window_reach",
    ),
    "init_block_table_layout_tensors": (),
    "append_block_ids": ("req_index", "new_block_ids", "overwrite"),
    "apply_staged_writes": (),
    "gather_block_tables": (
        "idx_mapping",
        "num_reqs_padded",
        "out",
        "out_ptrs",
        "num_computed_tokens",
    ),
    "get_dummy_block_tables": ("num_reqs",),
    "compute_slot_mappings": (
        "idx_mapping",
        "query_start_loc",
        "positions",
        "num_tokens_padded",
        "out",
    ),
    "get_dummy_slot_mappings": ("num_tokens",),
}
"""Methods of the v2 runner's `BlockTables` and their arguments, in order, without self."""

MULTI_GROUP_BLOCK_TABLE: Mapping[str, tuple[str, ...]] = {
    "__init__": (
        "max_num_reqs",
        "max_num_batched_tokens",
        "pin_memory",
        "device",
        "block_sizes",
        "max_num_blocks",
        "cp_kv_cache_interleave_size",
        "slot_mapping_modes",
    ),
    "append_row": ("block_ids", "row_idx"),
    "add_row": ("block_ids", "row_idx"),
    "clear_row": ("row_idx",),
    "move_row": ("src", "tgt"),
    "swap_row": ("src", "tgt"),
    "compute_slot_mapping": ("num_reqs", "query_start_loc", "positions"),
    "commit_block_table": ("num_reqs",),
    "clear": (),
}
"""The same for the v1 runner's `MultiGroupBlockTable`."""

MODEL_RUNNER: Mapping[str, tuple[str, ...]] = {
    "prepare_attn": ("input_batch",),
    "execute_model": (
        "scheduler_output",
        "intermediate_tensors",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "is_profile",
        "context_len",
        "valid_dummy_state_slots",
        "randomize_inputs",
    ),
}
"""The methods of the v2 `GPUModelRunner` between which writes may be deferred."""

ASCEND_LEADING = (*_V2_SIZES, "kernel_block_sizes")
"""How the constructor of vllm-ascend's own `AscendBlockTables` begins."""

_ASCEND_KNOWN = frozenset(ASCEND_LEADING) | frozenset(BLOCK_TABLES["__init__"])


class UnsupportedVllmError(BlockTableError):
    """The vLLM, or the vllm-ascend, that is installed has another interface than the one known."""


def check_version(*found: str) -> None:
    """Check that every version string given is the supported release.

    A local suffix ("+cu129") does not count.

    Raises:
        UnsupportedVllmError: names the version found and the one supported.
    """
    for version in found:
        if version.split("+")[0] != VLLM_VERSION:
            raise UnsupportedVllmError(
                "vllm",
                expected=f"version {VLLM_VERSION}",
                actual=version or "no version",
                hint="fused_slots plugs into that release only",
            )


def installed_version() -> str:
    """The version of the vllm distribution that is installed; empty when there is none."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ""


def check_methods(owner: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Check that a class has these methods with exactly these arguments, in this order.

    Raises:
        UnsupportedVllmError: names the method, its arguments and those expected.
    """
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        actual = _parameters(method) if callable(method) else None
        if actual != expected:
            raise UnsupportedVllmError(
                f"{owner.__module__}.{owner.__qualname__}.{name}",
                expected=f"({', '.join(expected)}), as in vllm {VLLM_VERSION}",
                actual="no such method" if actual is None else f"({', '.join(actual)})",
            )


def check_ascend(owner: type) -> None:
    """Check that vllm-ascend's class takes kernel_block_sizes after device and nothing unknown.

    Raises:
        UnsupportedVllmError: names its arguments and those expected.
    """
    actual = tuple(inspect.signature(owner).parameters)
    if actual[: len(ASCEND_LEADING)] != ASCEND_LEADING or not _ASCEND_KNOWN.issuperset(actual):
        raise UnsupportedVllmError(
            f"{owner.__module__}.{owner.__qualname__}",
            expected=f"({', '.join(ASCEND_LEADING)}, ...) and no other argument than those of "
            f"vllm {VLLM_VERSION}",
            actual=f"({', '.join(actual)})",
        )


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("self",) else names
