"""How device and host time are measured on a GPU.

Device time is read from CUDA graphs that hold many launches, so that launch gaps of the host do not
count; what a graph cannot hold (uploads) is queued behind a sleeping kernel instead. Host time is
the time to enqueue, with the device idle enough that its queue never blocks.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LAUNCHES = 50
REPEATS = 30


@dataclass(frozen=True)
class Timing:
    """Median and the 20th and 80th percentile, in microseconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        ordered = sorted(microseconds)
        fifth = len(ordered) // 5
        return cls(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth])


def raise_clocks(milliseconds: float = 150.0) -> None:
    """Keep the GPU busy for a while, so that it does not begin a measurement at idle clocks."""
    square = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < until:
        for _ in range(10):
            square @ square
        torch.cuda.synchronize()


def device_time(calls: Sequence[Callable[[], object]]) -> Timing:
    """Device time of one call, from replays of a graph that holds the calls in turn."""
    stream = torch.cuda.Stream()
    raise_clocks()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in range(LAUNCHES):
                calls[launch % len(calls)]()
        for _ in range(3):
            graph.replay()
        samples = []
        for _ in range(REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return Timing.of(samples)


def clock_time(calls: Sequence[Callable[[], object]], repeats: int = 5) -> Timing:
    """Time of one call by the clock, for dry runs on the CPU."""
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return Timing.of(samples)


@dataclass(frozen=True)
class Profile:
    """What the profiler saw of one step: device time of its kernels and copies, and calls."""

    device: float
    kernels: float
    copies: float
    synchronisations: float


def profiled(step: Callable[[], object], steps: int = 40) -> Profile:
    """Kernels, copies and synchronisations of whole steps, uploads included, per step."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    device, kernels, copies, waits = 0.0, 0, 0, -1  # the wait at the end is ours
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            device += event.device_time_total
            is_copy = event.name.startswith(("Memcpy", "Memset"))
            copies += is_copy
            kernels += not is_copy
        elif event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"):
            waits += 1
    return Profile(device / steps, kernels / steps, copies / steps, waits / steps)


def host_time(call: Callable[[], object], repeats: int = 300, between: int = 10) -> Timing:
    """Host time to enqueue one call, waiting for the device every `between` calls."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    # An engine freezes its heap too, so that collections do not walk all of it.
    gc.collect()
    gc.freeze()
    samples = []
    for repeat in range(repeats):
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
        if repeat % between == between - 1:
            torch.cuda.synchronize()
    gc.unfreeze()
    return Timing.of(samples)
