"""What a decode step of given sizes costs: bytes of a manager, microseconds of device and host.

Bytes are exact. Microseconds are linear in the terms of `TERMS`, with the factors that
bench/fit_cost_model.py found in the measured sweeps of one H200 (docs/cost_model.md); `ERRORS` says
how far they were off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Any

from fused_slots.faults import INT32_MAX, ConfigurationError, FaultCode, require_int
from fused_slots.groups import ContextParallel, KVCacheGroup
from fused_slots.layout import TableLayout
from fused_slots.plan import LONG, gather_helpers

MEASURED_ON = "NVIDIA H200, Python 3.12.3, torch 2.11.0, triton 3.6.0"

SWEPT = {"requests": (1, 4096), "groups": (1, 32), "context": (4096, 1 << 20), "ranks": (1, 1)}
"""What the measurements cover; beyond them the model extrapolates."""

_DESCRIPTOR = 16  # int32 numbers of a group


@dataclass(frozen=True)
class Load:
    """A steady decode step of one rank.

    Args:
        requests: batch entries, and rows of the tables.
        block_sizes: tokens of a block (K), one number a group.
        context: tokens of each request.
        max_num_batched_tokens: the capacity.
        tokens: of each request in a step; more than one with drafts.
        ranks: context parallel ranks that share every group.
        slot_bytes: 8, or 4 with int32 slots.

    Raises:
        ConfigurationError: names the number, what was expected and what came.
    """

    requests: int
    block_sizes: tuple[int, ...]
    context: int
    max_num_batched_tokens: int
    tokens: int = 1
    ranks: int = 1
    slot_bytes: int = 8

    def __post_init__(self) -> None:
        for field in ("requests", "context", "max_num_batched_tokens", "tokens", "ranks"):
            require_int(field, getattr(self, field), minimum=1)
        if not self.block_sizes:
            raise ConfigurationError("block_sizes", expected="one group or more", actual="none")
        for size in self.block_sizes:
            require_int("block_size", size, minimum=1)
        needed = self.requests * self.tokens
        if needed > self.max_num_batched_tokens:
            raise ConfigurationError(
                "max_num_batched_tokens",
                expected=f"at least {needed}: {self.requests} requests of {self.tokens} tokens",
                actual=str(self.max_num_batched_tokens),
            )

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """Full attention groups that hold the context."""
        return tuple(
            KVCacheGroup(size, -(-self.context // (size * self.ranks))) for size in self.block_sizes
        )

    @property
    def layout(self) -> TableLayout:
        """The layout of a manager for it."""
        import torch

        groups = self.groups
        return TableLayout(
            groups,
            tuple(group.row_width for group in groups),
            self.requests,
            self.max_num_batched_tokens,
            ContextParallel(self.ranks),
            0,
            torch.int64 if self.slot_bytes == 8 else torch.int32,
            (None,) * len(groups),
        )

    @property
    def columns(self) -> int:
        """Filled columns of one request, all groups."""
        return sum(group.max_num_blocks for group in self.groups)

    @property
    def appends(self) -> float:
        """Requests a step that get a block: those that reach a block's end in the finest group."""
        return self.requests * min(self.tokens / (min(self.block_sizes) * self.ranks), 1.0)

    @property
    def new_blocks(self) -> float:
        """Blocks a step, all requests and groups."""
        each = sum(self.tokens / (size * self.ranks) for size in self.block_sizes)
        return self.requests * each

    @property
    def packet_bytes(self) -> float:
        """Bytes a step over the bus to the device: host/packet.py."""
        lines = self.appends * (2 + 3 * len(self.block_sizes))
        return 4 * (self.requests + lines + self.new_blocks)

    @property
    def slot_megabytes(self) -> float:
        """MB of slots that a launch writes, the padded tail included."""
        return len(self.block_sizes) * self.max_num_batched_tokens * self.slot_bytes / 1e6


def _steady(load: Load) -> dict[str, float]:
    return {
        "launch": 1.0,
        "thousand entries x groups": load.requests * len(load.block_sizes) / 1e3,
        "MB of slots": load.slot_megabytes,
        "rows above 1,024 columns": float(max(g.max_num_blocks for g in load.groups) > LONG),
    }


TERMS: dict[str, Callable[[Load], dict[str, float]]] = {
    "slots": lambda load: {
        "launch": 1.0,
        "thousand tokens x groups": load.requests * load.tokens * len(load.block_sizes) / 1e3,
        "MB of slots": load.slot_megabytes,
        "doublings of the requests": log2(load.requests + 1),
    },
    "step": _steady,
    "writes": lambda load: {
        "copy": min(load.appends, 1.0),
        "thousand records": load.appends * len(load.block_sizes) / 1e3,
    },
    "whole": lambda load: {
        "launch": 1.0,
        "thousand entries x groups": load.requests * len(load.block_sizes) / 1e3,
        "MB of slots": load.slot_megabytes,
        "MB read and written": load.requests * load.columns * 8 / 1e6,
    },
    "host": lambda load: {
        "step": 1.0,
        "append": load.appends,
        "new block": load.new_blocks,
    },
}
"""By quantity: slot mapping alone; a step whose batch is that of the step before; what staged
writes add to it; a step that copies every row whole; the host's time of a step with its appends."""

FACTORS: dict[str, dict[str, float]] = {
    "slots": {
        "launch": 1.4899,
        "thousand tokens x groups": 0.01,
        "MB of slots": 0.1843,
        "doublings of the requests": 0.0373,
    },
    "step": {
        "launch": 2.0519,
        "thousand entries x groups": 0.2134,
        "MB of slots": 0.1657,
        "rows above 1,024 columns": 0.225,
    },
    "writes": {
        "copy": 0.5801,
        "thousand records": 3.0338,
    },
    "whole": {
        "launch": 5.0649,
        "thousand entries x groups": 0.0679,
        "MB of slots": 0.0954,
        "MB read and written": 0.293,
    },
    "host": {
        "step": 17.668,
        "append": 0.0225,
        "new block": 0.1748,
    },
}
"""Microseconds for one of each term."""

ERRORS: dict[str, tuple[float, float]] = {
    "slots": (0.04, 0.25),
    "step": (0.09, 0.17),
    "writes": (0.13, 0.11),
    "whole": (0.26, 0.21),
    "host": (0.54, 0.54),
}
"""The largest relative error on the points of the fit, and on those that were held out."""


def microseconds(quantity: str, load: Load) -> float:
    """One of `TERMS`, by the fitted factors."""
    factors = FACTORS[quantity]
    return sum(factors[term] * amount for term, amount in TERMS[quantity](load).items())


def outside(load: Load) -> list[str]:
    """In words, which numbers lie outside of what was measured."""
    numbers = {
        "requests": load.requests,
        "groups": len(load.block_sizes),
        "context": load.context,
        "ranks": load.ranks,
    }
    return [
        f"Times are extrapolated: {name} {numbers[name]:,}, measured were {low:,} to {high:,}."
        for name, (low, high) in SWEPT.items()
        if not low <= numbers[name] <= high
    ]


def table_bytes(layout: TableLayout) -> dict[str, int]:
    """Bytes of all that a manager allocates on a GPU at construction, by what they are for.

    Packets of staged writes, which are made as they are needed, come to this; so do sets of
    callers' tables (`out`), whose addresses are kept, and the details of checked mode.
    """
    groups, rows = layout.num_groups, layout.max_num_reqs
    slots = groups * layout.max_num_batched_tokens * layout.slot_dtype.itemsize
    helpers = gather_helpers(max(layout.widths, default=0), rows, groups)
    return {
        "block tables": 4 * layout.arena_size,
        "gathered block tables": 4 * layout.arena_size,
        "slot mappings": slots,
        "draft slot mappings": slots,
        "row lengths and generations": 8 * groups * rows,
        "state of the gather": 16 * helpers * groups * rows,
        "descriptors, fault counters, constants": (
            4 * _DESCRIPTOR * groups + 8 * (len(FaultCode) + 1) * groups + 8 * groups + 4 * rows
        ),
    }


def int32_requests(load: Load) -> tuple[int, int]:
    """Requests of this context whose slots fit int32: a pool a group, or one pool for all.

    With one pool for all groups, as vLLM has it, a block id counts the blocks of all groups, and
    the last slot is that id in the group of the largest blocks. Block 0 is nobody's.
    """
    own = (
        ((INT32_MAX + 1) // group.block_size - 1) // group.max_num_blocks for group in load.groups
    )
    return min(own), ((INT32_MAX + 1) // max(load.block_sizes) - 1) // load.columns


def cost(load: Load) -> dict[str, Any]:
    """Everything that the command prints, as JSON values."""
    memory = table_bytes(load.layout)
    tokens = load.requests * load.tokens
    device = microseconds("step", load) + microseconds("writes", load)
    host = microseconds("host", load)
    own, shared = int32_requests(load)
    return {
        "measured_on": MEASURED_ON,
        "notes": outside(load),
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "device_us": {
            "slots": round(microseconds("slots", load), 2),
            "step": round(microseconds("step", load), 2),
            "step_with_writes": round(device, 2),
            "every_row_copied": round(microseconds("whole", load), 2),
        },
        "host_us": round(host, 1),
        "errors": {quantity: list(errors) for quantity, errors in ERRORS.items()},
        "device_ns_per_token": round(1e3 * device / tokens, 2),
        "host_ns_per_token": round(1e3 * host / tokens, 2),
        "bus_bytes_per_step": round(load.packet_bytes),
        "bus_bytes_per_token": round(load.packet_bytes / tokens, 2),
        "int32_requests": {"pool_per_group": own, "one_pool": shared},
    }
