"""Block tables whose kernels are the code compiled for Ascend, executed on the CPU.

The package's own Triton backend does everything but the launch itself; so the public API, the
manager and the arguments it passes are those of a device, and any test of the API runs on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
import torch
from compile import ASCEND_910B3, CORES, CompiledKernel, compile_variant
from compile import Variant as Compilation
from hivm import EXACT, Alias, Execution, Modes, execute

from fused_slots.backends.ascend.arguments import COMPILE_OPTIONS, compile_time_values
from fused_slots.backends.ascend.device import runtime_signature
from fused_slots.backends.base import Step
from fused_slots.backends.launch import Binding, Launch, Launcher, Variant
from tests.kernels.ascend_forms import HostAscend


class HivmLauncher(Launcher):
    """Compiles variants for one target and executes them; keeps every execution's counts."""

    def __init__(self, target: str, modes: Modes, seed: int, recorded: bool = False) -> None:
        self.target, self.modes, self.seed, self.recorded = target, modes, seed, recorded
        self.kernels: dict[Variant, CompiledKernel] = {}
        self.executions: list[tuple[Variant, Execution]] = []

    def prepare(self, binding: Binding) -> Launch:
        kernel, variant = binding.kernel, binding.variant
        compilation = Compilation(str(variant), kernel, runtime_signature(binding),
                                  compile_time_values(variant), COMPILE_OPTIONS)
        compiled = self.kernels[variant] = compile_variant(compilation, self.target)

        def launch(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            arguments = [*tensors, *numbers, *binding.tensors, *binding.numbers]
            self._run(variant, compiled, binding.num_groups * programs, arguments)

        return launch

    def _run(
        self,
        variant: Variant,
        kernel: CompiledKernel,
        programs: int,
        arguments: Sequence[torch.Tensor | int],
    ) -> None:
        memory = [_memory(a) if isinstance(a, torch.Tensor) else None for a in arguments]
        first: dict[int, int] = {}
        given: list[int | np.ndarray | Alias] = []
        for number, (argument, flat) in enumerate(zip(arguments, memory, strict=True)):
            if flat is None:
                assert isinstance(argument, int)
                given.append(argument)
            elif flat.ctypes.data in first:
                given.append(Alias(first[flat.ctypes.data], flat.dtype))
            else:
                first[flat.ctypes.data] = number
                given.append(flat)
        done = execute(kernel.module, (programs,), given, modes=self.modes, seed=self.seed,
                       recorded=self.recorded)  # fmt: skip
        self.executions.append((variant, done))
        for flat, output in zip(memory, done.outputs, strict=True):
            if isinstance(output, np.ndarray):
                assert flat is not None
                flat[...] = output

    @property
    def compiled(self) -> int:
        return len(self.kernels)


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """The memory that a tensor spans, from its first to its last element, gaps included."""
    if tensor.numel() == 0:
        return np.zeros(0, str(tensor.dtype).removeprefix("torch."))
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).numpy()


class HivmBackend(HostAscend):
    """Block tables in host memory, worked on by executed Ascend code."""

    name = "ascend code"
    reads_tensors_on_host = False  # as a device: contents are made safe, not checked
    target: ClassVar[str] = ASCEND_910B3
    modes: ClassVar[Modes] = EXACT
    seed: ClassVar[int] = 0
    recorded: ClassVar[bool] = False
    cores: ClassVar[int] = CORES[target]

    def count_cores(self) -> int:
        return self.cores

    def make_launcher(self) -> Launcher:
        return HivmLauncher(self.target, self.modes, self.seed, self.recorded)

    def step(self, step: Step) -> None:
        """Tables of a caller go into one memory: the executor finds none but its arguments'."""
        out = together = step.tables_out
        if out is not None:
            sizes = [table.numel() for table in out]
            parts = torch.empty(sum(sizes), dtype=torch.int32).split(sizes)
            together = [part.view_as(table) for part, table in zip(parts, out, strict=True)]
            for part, table in zip(together, out, strict=True):
                part.copy_(table)
        super().step(step._replace(tables_out=together))
        for part, table in zip(together or (), out or (), strict=True):
            table.copy_(part)

    def first_of(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        """That memory whole."""
        whole = torch.empty(0, dtype=torch.int32)
        return whole.set_(out[0].untyped_storage())  # type: ignore[call-overload]


@contextmanager
def executed_on(
    target: str, *, modes: Modes = EXACT, seed: int = 0, recorded: bool = False, cores: int = 0
) -> Iterator[None]:
    """Managers built in this context run executed code of `target`, with its cores or others."""
    attributes = {"target": target, "modes": modes, "seed": seed, "recorded": recorded,
                  "cores": cores or CORES[target]}  # fmt: skip
    chosen = type("HivmBackend", (HivmBackend,), attributes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_slots.block_tables.backend_class", lambda device: chosen)
        yield
