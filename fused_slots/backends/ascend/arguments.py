"""What the compiler of the Ascend kernels is told of a variant."""

from __future__ import annotations

from typing import Any

from fused_slots.backends.launch import Variant

COMPILE_OPTIONS = {"multibuffer": False}
"""What the compiler is told. Loops seldom have a second iteration to load ahead for, so on-chip
memory goes to larger tiles instead of second buffers."""


def kernel_of(variant: Variant) -> Any:
    """The Triton function of a variant."""
    from fused_slots.kernels.ascend import slots, step

    kernels = {"slots_on_ascend": slots.slots_on_ascend, "step_on_ascend": step.step_on_ascend}
    return kernels[variant.kernel]


def compile_time_values(variant: Variant) -> dict[str, int]:
    """A kernel's constexpr arguments: its choices as one int of flags."""
    from fused_slots.kernels.ascend import layout

    chosen = [name for name, chosen in variant.constants if chosen]
    return {"FLAGS": sum(getattr(layout, name).value for name in chosen)}
