"""An NPU for rehearsals of bench/ascend_first_run: kernels interpreted, memory the host's.

Named by `--rehearse`; REHEARSAL, "device" or "device:part=what", says which device it is and what
goes wrong in which part: "hang", "crash", "wrong" for a kernel's result, else an error. Needs
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bench.ascend_first_run.device import Device
from fused_slots import backends
from fused_slots.backends.launch import Launch
from tests.kernels.ascend_forms import InterpretedAscend, OneAxisLauncher

CORES = {"Ascend910B3": 40, "Ascend910_9391": 48, "Ascend950PR_9589": 64}
DETAILS = "Name,Duration(us)\nslots_on_ascend,3.5\nstep_on_ascend,9.5\nslots_on_ascend,4.5\n"
real_backend_class, real_parse_device = backends.backend_class, backends.parse_device


class FakeNpu:
    """torch.npu: events by the clock, graphs that launch again what was launched."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.captured: list[Callable[[], None]] | None = None

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", time.perf_counter())
        event.elapsed_time = lambda last: (last.at - event.at) * 1e3
        return event

    def NPUGraph(self) -> Any:
        graph = SimpleNamespace(launches=[])
        graph.replay = lambda: [launch() for launch in graph.launches]
        return graph

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.captured = graph.launches
        yield
        self.captured = None


def device_class(part: str) -> type[Device]:
    """The device of a part's process, on which something may go wrong."""
    name, _, wrong = os.environ["REHEARSAL"].partition(":")
    where, _, what = wrong.partition("=")
    npu = FakeNpu(name)

    class Launcher(OneAxisLauncher):
        def prepare(self, *arguments: Any) -> Launch:
            launch = super().prepare(*arguments)

            def launched(*given: Any) -> None:
                if npu.captured is not None:
                    npu.captured.append(lambda: launch(*given))
                launch(*given)

            return launched

    class Backend(InterpretedAscend):
        def make_launcher(self) -> Launcher:
            return Launcher()

        def count_cores(self) -> int:
            return CORES[name]

    class Fake(Device):
        is_npu = True

        def __init__(self, name: str, quick: bool = False) -> None:
            if name == "cpu":  # the judge
                self.__class__ = Device  # type: ignore[assignment]
            self.name, self.quick, self.torch = name, quick, torch.device("cpu")
            if where == part and what != "wrong":
                go_wrong(what)

        def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
            constants.pop("inject_barrier_all", None)
            super().launch(kernel, programs, *arguments, **constants)
            if where == part and what == "wrong":
                [*_, last] = [a for a in arguments if isinstance(a, torch.Tensor)]
                last[0] += 5

    def parse_device(device: Any) -> torch.device:
        parsed.append(str(device))
        return torch.device("cpu")

    def backend_class(device: torch.device) -> Any:
        return Backend if parsed[-1].startswith("npu") else real_backend_class(device)

    parsed: list[str] = []
    mock.patch.object(torch, "npu", npu, create=True).start()
    mock.patch("fused_slots.block_tables.parse_device", parse_device).start()
    mock.patch("fused_slots.block_tables.backend_class", backend_class).start()
    sys.modules["torch_npu"] = torch_npu = ModuleType("torch_npu")
    torch_npu.profiler = SimpleNamespace(  # type: ignore[attr-defined]
        profile=profile, tensorboard_trace_handler=Path
    )
    return Fake


@contextmanager
def profile(on_trace_ready: Path) -> Iterator[None]:
    """torch_npu's profiler, which leaves a table of kernels below a folder."""
    yield
    folder = on_trace_ready / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    folder.mkdir(parents=True)
    (folder / "kernel_details.csv").write_text(DETAILS)


def go_wrong(what: str) -> None:
    """A hang that only SIGKILL ends, a crash of the process, or an error."""
    if what == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        time.sleep(600)
    elif what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError(what)


