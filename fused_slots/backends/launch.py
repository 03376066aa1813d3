"""Kernel variants, and what turns one into something that can be launched.

A variant is a kernel with its compile-time choices. A backend binds each variant once to the
tensors that never move; a launch then passes what changes from step to step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_slots.faults import BackendUnavailableError

Launch = Callable[[int, Sequence[torch.Tensor], Sequence[int]], None]
"""Launch a bound variant: programs per group, tensors and numbers that change from step to step."""


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time choices.

    Args:
        kernel: name of the kernel.
        index_dtype: of idx_mapping, or of the rows of drafts.
        slot_dtype: of the slots written.
        constants: the kernel's constexpr arguments, in its order.
        num_warps: warps of a program on CUDA.
        max_registers: registers of a thread that the assembler may use on CUDA; None = it weighs
            them against programs that fit a multiprocessor, and may spill a few for one more.
    """

    kernel: str
    index_dtype: torch.dtype
    slot_dtype: torch.dtype
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    max_registers: int | None = None

    @property
    def cuda_options(self) -> dict[str, int]:
        """What Triton is told when it compiles the variant for CUDA."""
        options = {"num_warps": self.num_warps}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options

    def __str__(self) -> str:
        flags = [name.lower() for name, value in self.constants if value is True]
        sizes = [f"{name.lower()}{value}" for name, value in self.constants if type(value) is int]
        types = [f"index_{_short(self.index_dtype)}", f"slot_{_short(self.slot_dtype)}"]
        return "-".join([self.kernel, *types, *sizes, *flags])


@dataclass(frozen=True)
class Binding:
    """What a launcher is told of a variant, once.

    Args:
        kernel: the Triton function.
        variant: its compile-time choices.
        num_groups: programs along the first axis of the grid.
        changing_types: Triton types of the arguments passed at each launch, such as "*i64".
        tensors: behind them, those of every launch; a backend allocated them, 16-byte aligned.
        numbers: behind these, those of every launch.
    """

    kernel: Any
    variant: Variant
    num_groups: int
    changing_types: Sequence[str]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]

    @property
    def types(self) -> list[str]:
        """Triton types of the kernel's arguments, those that are no constants."""
        fixed = [triton_type(tensor.dtype) for tensor in self.tensors]
        return [*self.changing_types, *fixed, *["i32"] * len(self.numbers)]


class Launcher(ABC):
    """Turns variants into launches on one device."""

    known = "Triton 3.6, 3.7.1 and 3.8 are known to"
    """Which releases take its launches."""

    compiled = 0
    """Kernels compiled since construction."""

    def bind(self, binding: Binding) -> Launch:
        """Compile a variant, fix the arguments that never change, and launch it once on nothing.

        That launch changes no memory. It is made because a launcher that does not fit is to be
        found before anybody depends on the variant.

        Raises:
            BackendUnavailableError: the variant compiles and its launch fails.
        """
        launch = self.prepare(binding)
        device = binding.tensors[0].device
        try:
            launch(1, *nothing(binding.kernel.arg_names, binding.changing_types, device))
        except Exception as error:
            import triton

            raise BackendUnavailableError(
                f"a launch of {binding.variant} on {device}",
                expected="a Triton whose launcher takes it",
                actual=f"Triton {triton.__version__}: {type(error).__name__}: {error}",
                hint=f"{self.known}; device='cpu' needs none",
            ) from error
        return launch

    @abstractmethod
    def prepare(self, binding: Binding) -> Launch:
        """Compile a variant, if that is needed, and fix the arguments that never change: `bind`
        without the launch on nothing."""


def nothing(
    names: Sequence[str], changing_types: Sequence[str], device: torch.device
) -> tuple[list[torch.Tensor], list[int]]:
    """Arguments of a launch that changes no memory: one program a group that pads no column.

    Args:
        names: the kernel's arguments, those that change from launch to launch first; tensors
            before numbers, of which `num_pad` counts the programs that pad.
        changing_types: their Triton types.
        device: of the tensors.

    Returns:
        Tensors of zeros, and numbers that are 0 but for `num_pad`.
    """
    dtypes = {triton_type(dtype): dtype for dtype in (torch.int32, torch.int64)}
    zeros = {name: torch.zeros(1, dtype=dtype, device=device) for name, dtype in dtypes.items()}
    pairs = list(zip(names, changing_types, strict=False))
    tensors = [zeros[type_] for _, type_ in pairs if type_ in zeros]
    numbers = [int(name == "num_pad") for name, type_ in pairs if type_ not in zeros]
    if sum(numbers) != 1:
        raise TypeError(f"a kernel without one num_pad among {[name for name, _ in pairs]}")
    return tensors, numbers


class InterpretedLauncher(Launcher):
    """Runs kernels in Triton's interpreter, on host memory (TRITON_INTERPRET=1)."""

    def prepare(self, binding: Binding) -> Launch:
        kernel, fixed = binding.kernel, (*binding.tensors, *binding.numbers)
        constants = dict(binding.variant.constants)

        def launch(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            kernel[binding.num_groups, programs](*tensors, *numbers, *fixed, **constants)

        return launch


def kernel_source(binding: Binding) -> Any:
    """What Triton compiles for a variant: only the fixed tensors' alignment is relied on."""
    from triton.compiler import ASTSource

    constants = dict(binding.variant.constants)
    types = [*binding.types, *["constexpr"] * len(constants)]
    first_fixed = len(binding.changing_types)
    aligned = range(first_fixed, first_fixed + len(binding.tensors))
    return ASTSource(
        fn=binding.kernel,
        signature=dict(zip(binding.kernel.arg_names, types, strict=True)),
        constexprs=constants,
        attrs={(argument,): [["tt.divisibility", 16]] for argument in aligned},
    )


def triton_type(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to elements of an integer dtype."""
    return f"*{_short(dtype)}"


def _short(dtype: torch.dtype) -> str:
    return {torch.int32: "i32", torch.int64: "i64"}[dtype]
