"""How device and host time are measured on a GPU.

Device time is read from CUDA graphs that hold many launches, so that launch gaps of the host do not
count; what a graph cannot hold (uploads) is queued behind a sleeping kernel instead. Host time is
the time to enqueue, with the device idle enough that its queue never blocks.
"""

from __future__ import annotations

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


def device_time(calls: Sequence[Callable[[], object]]) -> Timing:
    """Device time of one call, from replays of a graph that holds the calls in turn."""
    stream = torch.cuda.Stream()
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


def queued_time(prepare: Callable[[], Callable[[], object]], steps: int = 40) -> Timing:
    """Device time of one step whose host part may upload: steps queued behind a sleeping kernel."""
    samples = []
    for _ in range(7):
        step = prepare()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        host_begin = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - host_begin
        end.record()
        still_asleep = not begin.query()
        end.synchronize()
        if not still_asleep:
            raise RuntimeError(f"the host took {host * 1000:.0f} ms: the queue ran dry")
        samples.append(begin.elapsed_time(end) * 1000 / steps)
    return Timing.of(samples)


def host_time(call: Callable[[], object], repeats: int = 300, between: int = 10) -> Timing:
    """Host time to enqueue one call, waiting for the device every `between` calls."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    samples = []
    for repeat in range(repeats):
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
        if repeat % between == between - 1:
            torch.cuda.synchronize()
    return Timing.of(samples)
