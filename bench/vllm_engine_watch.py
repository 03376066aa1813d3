"""What is measured of a running engine: times of its steps, launches, kernels by name."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SLEEP_CYCLES = 10_000_000
"""About 5 ms on an H200: longer than the host takes to queue a step's preparation."""


@contextmanager
def measuring(kind: str, runner: Any, batch: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """What is measured inside the context; call what it gives when the context is left."""
    if kind == "profile":
        with profiling(runner) as numbers:
            yield numbers
    elif kind == "decode":
        with timing_steps(runner, batch) as numbers:
            yield numbers
    elif kind == "plain":
        launches = getattr(runner.block_tables, "launches", None)
        with counting(runner) as steps:

            def counts() -> dict[str, Any]:
                if launches is None:
                    return {"steps": steps.total()}
                return {
                    "steps": steps.total(),
                    "launches": runner.block_tables.launches - launches,
                }

            yield counts
    else:
        watch = Watch(runner, batch, on_device=kind == "device")
        try:
            yield watch.numbers
        finally:
            watch.remove()


@contextmanager
def timing_steps(runner: Any, batch: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Tokens per second over the steps that decode the whole batch, by the host's clock."""
    execute_model = runner.execute_model
    begins: list[float] = []

    def timed(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) == batch:
            begins.append(time.perf_counter())
        return execute_model(output, *args, **kwargs)

    def numbers() -> dict[str, Any]:
        steps = len(begins) - 1
        return {"steps": steps, "tokens_per_second": batch * steps / (begins[-1] - begins[0])}

    runner.execute_model = timed
    try:
        yield numbers
    finally:
        del runner.execute_model


@contextmanager
def counting(runner: Any) -> Iterator[Counter[str]]:
    """Steps with tokens."""
    execute_model = runner.execute_model
    steps: Counter[str] = Counter()

    def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps["steps"] += scheduler_output.total_num_scheduled_tokens > 0
        return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = counted
    try:
        yield steps
    finally:
        del runner.execute_model


class Watch:
    """Wraps methods of one runner and its tables, and notes when each begins and ends.

    Args:
        batch: only steps that schedule one token for each of so many requests count.
        on_device: note CUDA events instead of the host's time.
    """

    PARTS = ("append_block_ids", "apply_staged_writes", "prepare_inputs", "prepare_attn")

    def __init__(self, runner: Any, batch: int, on_device: bool) -> None:
        self._runner, self._batch, self._on_device = runner, batch, on_device
        self._steps: list[dict[str, list[tuple[Any, Any]]]] = []
        self._now: dict[str, list[tuple[Any, Any]]] = {}
        self._begin: Any = None
        self._wrapped: list[tuple[Any, str]] = []
        self._wrap(runner, "execute_model", self._step)
        for name in self.PARTS:
            owner = runner.block_tables if hasattr(runner.block_tables, name) else runner
            self._wrap(owner, name, self._part(name))

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(method, *args, **kwargs))
        self._wrapped.append((owner, name))

    def remove(self) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _part(self, name: str) -> Callable[..., Any]:
        def wrapper(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            result = method(*args, **kwargs)
            end = self._mark()
            self._now.setdefault(name, []).append((begin, end))
            if name == "prepare_attn":
                self._now["preparation"] = [(self._begin, end)]
            return result

        return wrapper

    def _step(self, method: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._on_device:
            import torch

            torch.cuda._sleep(SLEEP_CYCLES)
        begin = self._mark()
        if self._begin is not None and not self._on_device:
            self._now["between_steps"] = [(self._begin, begin)]
        self._begin, self._now = begin, {}
        counts = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens == len(counts) == self._batch:
            self._steps.append(self._now)
        return method(output, *args, **kwargs)

    def numbers(self) -> dict[str, Any]:
        """Microseconds of a step: medians over the steps.

        The mean tells more of the block tables: new blocks come only every few steps.
        """
        if self._on_device:
            import torch

            torch.cuda.synchronize()
        steps = [step for step in self._steps if "preparation" in step]
        named: dict[str, Any] = {"steps": len(steps)}
        for name in ("preparation", *self.PARTS, "between_steps"):
            values = [self._sum(step, name) for step in steps]
            if any(values):
                named[f"{name}_us"] = round(statistics.median(values), 2)
        parts = [name for name in self.PARTS if name != "prepare_inputs"]
        values = [sum(self._sum(step, name) for name in parts) for step in steps]
        named["block_tables_us"] = round(statistics.median(values), 2)
        named["block_tables_mean_us"] = round(statistics.fmean(values), 2)
        return named

    def _sum(self, step: dict[str, list[tuple[Any, Any]]], name: str) -> float:
        marks = step.get(name, [])
        if self._on_device:
            return sum(begin.elapsed_time(end) * 1e3 for begin, end in marks)
        return sum((end - begin) * 1e6 for begin, end in marks)


@contextmanager
def profiling(runner: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Kernels and copies per step, by name."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with counting(runner) as steps, torch.profiler.profile(activities=activities) as profile:

        def numbers() -> dict[str, Any]:
            counts: Counter[str] = Counter()
            times: Counter[str] = Counter()
            for event in profile.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    counts[event.name] += 1
                    times[event.name] += event.device_time_total
            total = max(steps.total(), 1)
            return {
                "steps": steps.total(),
                "kernels_and_copies": counts.total() / total,
                "device_us": sum(times.values()) / total,
                "by_name": {
                    name[:80]: [round(counts[name] / total, 2), round(times[name] / total, 2)]
                    for name in counts
                },
            }

        yield numbers
        torch.cuda.synchronize()
