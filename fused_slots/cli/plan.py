"""The plan command: what a decode step of given sizes costs, by the cost model."""

from __future__ import annotations

import argparse
from typing import Any

from fused_slots.cli.result import Result, Status
from fused_slots.cost_model import ERRORS, MEASURED_ON, Load, cost, outside
from fused_slots.faults import ConfigurationError, require_int

_MAX_GROUPS = 4096
"""Models have tens."""


def run_plan(args: argparse.Namespace) -> Result:
    """Work it out; nothing is allocated and no device is needed."""
    groups = len(args.block_size) if args.groups is None else args.groups
    require_int("--groups", groups, minimum=1, maximum=_MAX_GROUPS)
    if groups < len(args.block_size):
        raise ConfigurationError(
            "--block-size",
            expected=f"at most {groups} sizes, one a group (fewer are repeated)",
            actual=str(len(args.block_size)),
        )
    capacity = args.max_num_batched_tokens
    load = Load(
        args.requests,
        tuple(args.block_size[g % len(args.block_size)] for g in range(groups)),
        args.context,
        max(8192, args.requests * args.tokens) if capacity is None else capacity,
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
        f"{_counted(load.requests, 'request')} x {_counted(len(load.block_sizes), 'group')}, "
        f"context {load.context:,}, {_counted(load.tokens, 'token')} a request and step, capacity "
        f"{load.max_num_batched_tokens:,}, {_counted(load.ranks, 'rank')}",
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


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s'[: number > 1]}"
