"""Record schedules from vLLM's own Scheduler and KVCacheManager, on a machine without a GPU.

The scheduler is real; the model is replaced by random tokens, and the runner by the few rules of
vLLM's v2 runner that decide rows, batch order and positions. What the KV manager holds for every
scheduled request is kept beside it as the truth.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from fused_slots.groups import NULL_BLOCK_ID, KVCacheGroup
from fused_slots.inspect.schedule import Schedule
from fused_slots.vllm.scheduler_scenarios import SCENARIOS, RecordingError, Scenario

VLLM_VERSION = "0.33.0"

_ENVIRONMENT = {
    # An empty device list keeps Triton usable without a driver; the scheduler needs no device.
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    # A preempted request comes back as a new one only for the v2 runner.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def require_vllm() -> None:
    """Check that the vLLM that is installed is the one whose scheduler this module drives.

    Raises:
        RecordingError: vLLM is missing, or is another version.
    """
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = "no vllm"
    if found != VLLM_VERSION:
        raise RecordingError(
            "vllm",
            expected=f"version {VLLM_VERSION} installed",
            actual=found,
            hint="Recordings that ship with the package need no vllm: see load_recording",
        )


def find_scenario(name: str) -> Scenario:
    """The scenario of that name.

    Raises:
        RecordingError: there is none; the message lists those there are.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    known = ", ".join(scenario.name for scenario in SCENARIOS)
    raise RecordingError("scenario", expected=f"one of {known}", actual=repr(name))


def record(scenario: str | Scenario, path: str | Path) -> Schedule:
    """Drive vLLM's scheduler through `scenario`, check the recording and write it to `path`.

    Sets the environment variables that vLLM needs on a machine without a GPU, where they are not
    set; vLLM reads them when it is first imported, so call this in a process of its own.

    Raises:
        RecordingError: no such scenario, no vLLM 0.33.0, something that the scenario exists for
            did not happen, or rows and KV manager disagree.
    """
    if isinstance(scenario, str):
        scenario = find_scenario(scenario)
    require_vllm()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from fused_slots.vllm.scheduler_loop import SchedulerLoop

    loop = SchedulerLoop(scenario)
    steps = list(loop.run())
    missing = [count for count in scenario.must_happen if not loop.counts[count]]
    if missing:
        raise RecordingError(
            f"scenario {scenario.name}", expected=f"some {', '.join(missing)}", actual="none"
        )
    schedule = Schedule.from_steps(
        steps,
        name=scenario.name,
        groups=loop.groups,
        max_num_reqs=scenario.max_num_reqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        num_blocks=scenario.num_blocks,
        metadata={
            "vllm": VLLM_VERSION,
            "scenario": scenario.name,
            "description": scenario.description,
            "seed": scenario.seed,
            "async": scenario.asynchronous,
            "prefix_caching": scenario.prefix_caching,
            "draft_tokens": scenario.draft_tokens,
            "counts": loop.counts,
        },
    )
    check_rows(schedule)
    schedule.save(path)
    return schedule


def check_rows(schedule: Schedule) -> int:
    """Replay the appends into plain lists and compare them with what the KV manager holds.

    Every block of the KV manager must stand at its column of the row; where the manager holds the
    null block, the row may still hold the freed block. All columns that the step's tokens read or
    write must hold blocks, and a block is written for one request in one group only.

    Returns:
        The number of columns compared.

    Raises:
        RecordingError: names step, request, group, and what differs.
    """
    rows: dict[int, list[list[int]]] = {}
    compared = 0
    for index, step in enumerate(schedule):
        for append in step.appends:
            if append.overwrite:
                rows[append.req_index] = [[] for _ in schedule.groups]
            for row, block_ids in zip(rows[append.req_index], append.block_ids, strict=True):
                row.extend(block_ids)
        writers: dict[int, str] = {}
        for entry, req_index in enumerate(step.idx_mapping.tolist()):
            start, end = step.query_start_loc[entry : entry + 2].tolist()
            first, last = int(step.positions[start]), int(step.positions[end - 1])
            for g, group in enumerate(schedule.groups):
                where = f"step {index}, request {step.request_ids[entry]}, group {g}"
                held = step.expected_blocks[g][entry].tolist()
                _compare(where, rows[req_index][g], held)
                _check_use(where, group, held, first, last, writers)
                compared += len(held)
    return compared


def _compare(where: str, row: list[int], held: list[int]) -> None:
    if len(row) != len(held):
        raise RecordingError(where, expected=f"{len(held)} columns", actual=f"{len(row)}")
    for column, (actual, expected) in enumerate(zip(row, held, strict=True)):
        if expected not in (NULL_BLOCK_ID, actual):
            raise RecordingError(
                f"{where}, column {column}", expected=f"block {expected}", actual=f"{actual}"
            )


def _check_use(
    where: str, group: KVCacheGroup, held: list[int], first: int, last: int, writers: dict[int, str]
) -> None:
    """Tokens `first` to `last` read and write blocks that are there and nobody else writes."""
    if group.circular:
        readable = written = final = 0
    else:
        reach = group.sliding_window_reach
        final = last // group.block_size
        written = first // group.block_size if group.maps_slots else final
        readable = max(first - reach, 0) // group.block_size if reach else written
    for column in range(readable, final + 1):
        block = held[column] if column < len(held) else NULL_BLOCK_ID
        if block == NULL_BLOCK_ID:
            raise RecordingError(f"{where}, column {column}", expected="a block", actual="none")
        if column >= written and writers.setdefault(block, where) != where:
            raise RecordingError(
                f"{where}, column {column}",
                expected=f"block {block} written here only",
                actual=f"also written by {writers[block]}",
            )
