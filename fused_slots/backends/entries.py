"""What a kernel entry takes, as its signature declares it.

Each runtime argument is annotated with Triton's name of its type, such as "*i64" or "i32"; of
"*index", "*slot" and "*table" a variant decides how wide they are. Bound launches take their order
and their types from here.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_slots.backends.launch import triton_type


def runtime_types(kernel: Any, **chosen: torch.dtype) -> dict[str, str]:
    """The Triton type of each argument that is no constant, by name and in order.

    Args:
        kernel: a Triton function, compiled or interpreted.
        chosen: what a variant decides.
    """
    widths = {f"*{word}": triton_type(dtype) for word, dtype in chosen.items()}
    return {
        name: widths.get(annotation, annotation)
        for name, annotation in kernel.fn.__annotations__.items()
        if isinstance(annotation, str)
    }
