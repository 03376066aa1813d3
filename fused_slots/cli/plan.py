"""The plan command: what a decode step of given sizes costs, by the cost model."""

from __future__ import annotations

import argparse
from typing import Any

from fused_slots.cli.result import Result, Status
from fused_slots.cost_model import ERRORS, MEASURED_ON, Load, cost, outside
from fused_slots.faults import ConfigurationError, require_int


def run_plan(args: argparse.Namespace) -> Result:
    """Work it out; nothing is allocated and no device is needed."""
    groups = args.groups or len(args.block_size)
    require_int("--groups", groups, minimum=1)
    if groups < len(args.block_size):
        raise ConfigurationError(
            "--block-size",
            expected=f"at most {groups} sizes, one a group (fewer are repeated)",
            actual=str(len(args.block_size)),
        )
    load = Load(
        args.requests,
        tuple(args.block_size[g % len(args.block_size)] for g in range(groups)),
        args.context,
        args.max_num_batched_tokens or max(8192, args.requests * args.tokens),
        args.tokens,
        args.ranks,
        4 if args.slot_dtype == "int32" else 8,
    )
    document = {"load": vars(load), **cost(load)}
    return Result(Status.GOOD, document, _text(load, document))


def _text(load: Load, document: dict[str, Any]) -> str:
    memory, device = document["memory_bytes"], document["device_us"]
    int32 = document["int32_requests"]
    lines = [
        f"{load.requests:,} requests x {len(load.block_sizes)} groups, context {load.context:,}, "
        f"{load.tokens} token{'s'[: load.tokens > 1]} a request and step, "
        f"capacity {load.max_num_batched_tokens:,}, {load.ranks} rank{'s'[: load.ranks > 1]}",
        "",
        "Device memory of one rank's manager, bytes (exact)",
        *(f"  {name:<46}{size:>16,}" for name, size in memory.items()),
        f"  {'a request':<46}{memory['total'] / load.requests:>16,.0f}",
        "",
        f"Microseconds of a decode step ({MEASURED_ON})",
        _time("slot mapping alone", device["slots"], "slots"),
        _time("step, batch as before", device["step"], "step"),
        _time("step with its staged writes", device["step_with_writes"], "writes"),
        _time("step that copies every row whole", device["every_row_copied"], "whole"),
        _time("host, appends and launch", document["host_us"], "host"),
        f"  {'a token, device and host, nanoseconds':<46}"
        f"{document['device_ns_per_token']:>10,.1f}{document['host_ns_per_token']:>10,.1f}",
        "",
        "Limits",
        f"  {'bytes to the device, a step and a token':<46}"
        f"{document['bus_bytes_per_step']:>10,}{document['bus_bytes_per_token']:>10,.1f}",
        f"  {'requests whose slots fit int32, a pool a group':<46}{int32['pool_per_group']:>16,}",
        f"  {'requests whose slots fit int32, one pool':<46}{int32['one_pool']:>16,}",
    ]
    notes = outside(load)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _time(name: str, value: float, quantity: str) -> str:
    fit, held_out = (round(100 * error) for error in ERRORS[quantity])
    return (
        f"  {name:<46}{value:>10,.1f}   off by {fit} % at most in the fit, {held_out} % elsewhere"
    )
