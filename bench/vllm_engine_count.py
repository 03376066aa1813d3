"""A vLLM plugin beside ours that prints how many launches each step of an engine took.

It also counts preemptions. It wraps nothing that the plugin wraps or reads, so the plugin itself
runs as it always does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fused_slots.vllm.deferral import DeferringBlockTables

EVERY = 32
"""Steps between two lines."""


def register() -> None:
    """Count from now on, in this process; the second call does nothing."""
    defer_writes = DeferringBlockTables.defer_writes
    if hasattr(defer_writes, "launches"):
        return
    launches: Counter[int] = Counter()
    preemptions = count_preemptions()

    @contextmanager
    def counted(self: DeferringBlockTables) -> Iterator[None]:
        before = self.launches
        try:
            with defer_writes(self):
                yield
        finally:
            launches[self.launches - before] += 1
            if launches.total() % EVERY == 0:
                print(
                    f"fused_slots launches: {dict(launches)} preemptions: {preemptions.total()} "
                    f"process {os.getpid()}",
                    flush=True,
                )

    counted.launches = launches  # type: ignore[attr-defined]
    DeferringBlockTables.defer_writes = counted  # type: ignore[method-assign]


def count_preemptions() -> Counter[str]:
    """Count what vLLM's scheduler preempts in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request
    counts: Counter[str] = Counter()

    def counted(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(self, *args, **kwargs)

    Scheduler._preempt_request = counted
    return counts
