"""What the Ascend kernels take, read from their signatures: there alone arguments are declared."""

from __future__ import annotations

from typing import Any

from fused_slots.backends.launch import Variant, triton_type

COMPILE_OPTIONS = {"multibuffer": False}
"""What the compiler is told. Loops seldom have a second iteration to load ahead for, so on-chip
memory goes to larger tiles instead of second buffers."""


def kernel_of(variant: Variant) -> Any:
    """The Triton function of a variant."""
    from fused_slots.kernels.ascend import slots, step

    kernels = {"slots_on_ascend": slots.slots_on_ascend, "step_on_ascend": step.step_on_ascend}
    return kernels[variant.kernel]


def runtime_types(variant: Variant) -> dict[str, str]:
    """The Triton type of each runtime argument, by name and in order.

    A kernel annotates them with their types; "*index" and "*slot" are the variant's own.
    """
    dtypes = {
        "*index": triton_type(variant.index_dtype),
        "*slot": triton_type(variant.slot_dtype),
    }
    annotations = kernel_of(variant).fn.__annotations__
    return {
        name: dtypes.get(annotation, annotation)
        for name, annotation in annotations.items()
        if isinstance(annotation, str)
    }


def compile_time_values(variant: Variant) -> dict[str, int]:
    """A kernel's constexpr arguments: its tile, and its choices as one int of flags."""
    from fused_slots.kernels.ascend import layout

    choices = dict(variant.constants)
    tile = choices.pop("TILE")
    flags = sum(getattr(layout, name).value for name, chosen in choices.items() if chosen)
    return {"TILE": tile, "FLAGS": flags}
