"""Guard bands: every device buffer lies between bands whose bytes must never change."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from fused_slots import block_tables
from fused_slots.layout import ARENA_ALIGNMENT
from tests.configuration import Config, make_manager
from tests.model import Mismatch

BAND = 256
"""Elements of a band."""
PATTERN = -1_431_655_766


def guarded(backend: type) -> type:
    """A backend whose buffers have bands round them, the tables of an arena among them."""

    class Guarded(backend):  # type: ignore[misc]
        def __init__(self, layout: Any, device: torch.device, checked: bool) -> None:
            self.bands: list[tuple[str, torch.Tensor]] = []
            offsets, end = [], BAND
            for width in layout.widths:
                offsets.append(end)
                end += -(-(layout.max_num_reqs * width + BAND) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
            layout.__dict__["offsets"] = (*offsets, end)
            super().__init__(layout, device, checked)
            for name, arena in (("table", self.arena), ("input table", self.input_arena)):
                ends = [0] + [
                    offset + layout.max_num_reqs * width
                    for offset, width in zip(offsets, layout.widths, strict=True)
                ]
                for g, (begin, stop) in enumerate(zip(ends, (*offsets, end), strict=True)):
                    arena[begin:stop] = PATTERN
                    self.bands.append((f"before {name} {g}", arena[begin:stop]))

        def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> torch.Tensor:
            size = 1
            for extent in shape:
                size *= extent
            whole = super().allocate((size + 2 * BAND,), dtype, PATTERN)
            self.bands.append((f"below a buffer of shape {shape}", whole[:BAND]))
            self.bands.append((f"above a buffer of shape {shape}", whole[BAND + size :]))
            middle = whole[BAND : BAND + size]
            middle.fill_(fill)
            view: torch.Tensor = middle.view(shape)
            return view

    return Guarded


def make_guarded(config: Config, device: str = "cpu") -> Any:
    """A manager whose backend is guarded."""

    unguarded = block_tables.backend_class

    def choose(chosen: torch.device) -> type:
        return guarded(unguarded(chosen))

    with mock.patch.object(block_tables, "backend_class", choose):
        return make_manager(config, device)


def check_bands(manager: Any) -> None:
    """Raise `Mismatch` when a byte of a band has changed."""
    for name, band in manager._backend.bands:
        if not bool((band == PATTERN).all()):
            raise Mismatch(f"the guard band {name} was written to")
