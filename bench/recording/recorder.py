"""Record schedules from vLLM's own Scheduler and KVCacheManager, on a machine without a GPU.

The scheduler is real; the model is replaced by random tokens, and the runner by the few rules of
vLLM's v2 runner that decide rows, batch order and positions. What the KV manager holds for every
scheduled request is kept beside it as the truth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from bench.recording.scenarios import SCENARIOS, RecordingError, Scenario
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import Schedule, ScheduleStep

VLLM_VERSION = "0.33.0"
"""The release whose scheduler is driven, and that the shipped recordings come from."""

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


def record(
    scenario: str | Scenario,
    path: str | Path,
    watch: Callable[[Iterable[ScheduleStep], int], Iterable[ScheduleStep]] = lambda steps, _: steps,
) -> Schedule:
    """Drive vLLM's scheduler through `scenario`, check the recording and write it to `path`.

    Sets the environment variables that vLLM needs on a machine without a GPU, where they are not
    set; vLLM reads them when it is first imported, so call this in a process of its own.

    Args:
        scenario: one of `SCENARIOS`, or its name.
        path: the file to write.
        watch: passes the steps through, given their number: for whoever shows progress.

    Raises:
        RecordingError: no such scenario, no vLLM 0.33.0, something that the scenario exists for
            did not happen, or rows and KV manager disagree.
    """
    if isinstance(scenario, str):
        scenario = find_scenario(scenario)
    require_vllm()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from bench.recording.scheduler_loop import SchedulerLoop

    loop = SchedulerLoop(scenario)
    steps = list(watch(loop.run(), scenario.num_steps))
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
    for finding in ScheduleCheck(schedule):
        raise RecordingError(f"scenario {scenario.name}", expected="no finding", actual=finding)
    schedule.save(path)
    return schedule
