"""What a manager tells whoever runs it: NVTX ranges, metrics, and a line at the process's end.

All of it stands between a manager and its backend only where it was asked for.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from fused_slots import env
from fused_slots.between_steps import BetweenSteps
from fused_slots.logs import logger
from fused_slots.stats import Stats

CALLS = ("step", "map_slots", "map_tokens")
"""The backend's operations that launch."""

COUNTERS = {
    "steps": "Steps of the block tables",
    "launches": "Operations of the block tables started on the device",
    "appends": "Calls that changed rows",
    "packets": "Transfers of staged writes to the device",
    "bytes_staged": "Bytes of these transfers",
    "ring_waits": "Waits of the host for the device before a transfer",
}
ROWS, FAULTS = "Rows that hold blocks now", "Tokens padded, or rows zeroed, as faults"

_texts: dict[int, str] = {}
"""Of this process's managers, by number, what the file of metrics holds of each."""
_made: dict[str, Any] = {}
"""prometheus_client's metrics in this process."""
_num_managers = 0


def observe(tables: BetweenSteps) -> None:
    """Begin whatever the environment asks for."""
    backend = tables._backend
    if env.NVTX.read() == "1":
        try:
            _in_range(lambda: None, "nothing")()
        except RuntimeError as error:
            logger.warning("No NVTX ranges: %s", error)
        else:
            for name in CALLS:
                setattr(backend, name, _in_range(getattr(backend, name), name))
    seconds = int(env.METRICS.read())
    if seconds:
        publish = _publisher()
        if publish is not None:
            published = _every(seconds, lambda: _update(tables, publish))
            for name in CALLS:
                setattr(backend, name, _behind(published, getattr(backend, name)))
            _at_exit(tables, lambda last: _update(last, publish))


def say_at_exit(tables: BetweenSteps) -> None:
    """Log what these tables have done when the process ends, should they still be there."""

    def say(last: BetweenSteps) -> None:
        logger.info("fused_slots: rank %d: %s", process_rank(), last.stats())

    _at_exit(tables, say)


def _at_exit(tables: BetweenSteps, tell: Callable[[BetweenSteps], None]) -> None:
    alive = weakref.ref(tables)

    def tell_if_alive() -> None:
        found = alive()
        if found is not None:
            tell(found)

    Finalize(None, tell_if_alive, exitpriority=0)  # of a process's children too, unlike atexit


def process_rank() -> int:
    """This process's rank among an engine's workers: torch.distributed's, or RANK, or 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _in_range(call: Callable[..., None], name: str) -> Callable[..., None]:
    push: Callable[[str], Any] = torch.cuda.nvtx.range_push
    pop: Callable[[], Any] = torch.cuda.nvtx.range_pop

    def ranged(*args: Any) -> None:
        push(f"fused_slots.{name}")
        try:
            call(*args)
        finally:
            pop()

    return ranged


def _update(tables: BetweenSteps, publish: Callable[[Stats], None]) -> None:
    try:
        publish(tables.stats())
    except Exception as error:  # metrics must not stop an engine
        logger.warning("No metrics: %s: %s", type(error).__name__, error)


def _every(seconds: int, call: Callable[[], None]) -> Callable[[], None]:
    due = time.monotonic()

    def called() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + seconds
            call()

    return called


def _behind(first: Callable[[], None], call: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        first()
        call(*args)

    return both


def _publisher() -> Callable[[Stats], None] | None:
    """What publishes a manager's counts; None = nothing is there to publish to, which is logged."""
    global _num_managers
    number, _num_managers = _num_managers, _num_managers + 1
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        if find_spec("prometheus_client") is None:
            logger.warning("No metrics: PROMETHEUS_MULTIPROC_DIR is set, no prometheus_client")
            return None
        last: dict[tuple[str, ...], int] = {}
        return lambda stats: _count(stats, number, last)
    folder = env.METRICS_DIR.read()
    if not Path(folder or "\0").is_dir():
        logger.warning("No metrics: %s is no folder: %r", env.METRICS_DIR.name, folder)
        return None
    return lambda stats: _write(stats, number, Path(folder))


def _values(stats: Stats) -> Iterator[tuple[str, dict[str, str], int]]:
    for name in COUNTERS:
        yield name, {}, getattr(stats, name)
    for fault in stats.faults:
        labels = {"code": fault.code.name.lower(), "group": fault.group_name or str(fault.group)}
        yield "faults", labels, fault.count


def _count(stats: Stats, number: int, last: dict[tuple[str, ...], int]) -> None:
    """Into the metrics that prometheus_client shares between processes."""
    from prometheus_client import Counter, Gauge

    if not _made:
        for name, text in COUNTERS.items():
            _made[name] = Counter(f"fused_slots_{name}", text, ["rank", "manager"])
        _made["faults"] = Counter(
            "fused_slots_faults", FAULTS, ["rank", "manager", "code", "group"]
        )
        labels = ["rank", "manager"]
        _made["rows"] = Gauge("fused_slots_rows", ROWS, labels, multiprocess_mode="livesum")
    ours = {"rank": str(process_rank()), "manager": str(number)}
    _made["rows"].labels(**ours).set(stats.rows)
    for name, labels_of_one, value in _values(stats):
        key = (name, *labels_of_one.values())
        _made[name].labels(**ours, **labels_of_one).inc(max(value - last.get(key, 0), 0))
        last[key] = value


def _write(stats: Stats, number: int, folder: Path) -> None:
    """Into this process's file, which is replaced as a whole."""
    ours = {"rank": str(process_rank()), "manager": str(number)}
    lines = [f"fused_slots_rows{_labels(ours)} {stats.rows}"]
    for name, labels, value in _values(stats):
        lines.append(f"fused_slots_{name}_total{_labels({**ours, **labels})} {value}")
    _texts[number] = "\n".join(lines)
    metrics = [line for text in _texts.values() for line in text.split("\n")]
    texts = {**{f"{name}_total": text for name, text in COUNTERS.items()}, "rows": ROWS}
    content = []
    for name, text in {**texts, "faults_total": FAULTS}.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        content += [f"# HELP fused_slots_{name} {text}", f"# TYPE fused_slots_{name} {kind}"]
        content += [line for line in metrics if line.startswith(f"fused_slots_{name}{{")]
    path = folder / f"fused_slots-rank{process_rank()}-pid{os.getpid()}.prom"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("\n".join(content) + "\n")
    unfinished.replace(path)


def _labels(labels: dict[str, str]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}"
