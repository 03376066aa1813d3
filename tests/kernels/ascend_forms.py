"""The Ascend backend's operations on host memory, and simulated lives that suit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from fused_slots import AscendBlockTables
from fused_slots.backends.ascend.arguments import compile_time_values
from fused_slots.backends.ascend.operations import AscendOperations
from fused_slots.backends.device import Fill, T, Uploads
from fused_slots.backends.interpreter import HostPackets
from fused_slots.backends.launch import (
    Binding,
    InterpretedLauncher,
    Launch,
    Launcher,
)
from fused_slots.faults import ConfigurationError
from tests.backends_under_test import MakeTables
from tests.configuration import FEATURES, NEW, Config, Target, make_manager
from tests.simulator import Report, SimulationError, simulate


class HostAscend(AscendOperations):
    """Everything but the launcher, which a subclass brings."""

    def count_cores(self) -> int:
        return 40

    def make_uploads(self) -> Uploads:
        return DirtyPackets()

    def synchronize(self) -> None:
        """Nothing: a launch returns when it is done."""


class DirtyPackets(HostPackets):
    """Packets that hold garbage until they are filled."""

    def upload(self, size: int, fill: Fill[T]) -> tuple[torch.Tensor, T]:
        packet = torch.full((size,), -77, dtype=torch.int32)
        return packet, fill(packet.numpy())


class OneAxisLauncher(InterpretedLauncher):
    """Interprets kernels whose grid has one axis."""

    def prepare(self, binding: Binding) -> Launch:
        kernel, fixed = binding.kernel, (*binding.tensors, *binding.numbers)
        constants = compile_time_values(binding.variant)

        def launch(programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
            kernel[binding.num_groups * programs,](*tensors, *numbers, *fixed, **constants)

        return launch


class InterpretedAscend(HostAscend):
    """The Ascend kernels in Triton's interpreter; three cores, so that programs take turns."""

    name = "interpreted ascend"

    def make_launcher(self) -> Launcher:
        return OneAxisLauncher()

    def count_cores(self) -> int:
        return 3


OFFERED = NEW - {"repeats"}
"""Of what not every device has."""


class MakeAscendTables(MakeTables):
    """A factory of managers whose kernels are the Ascend ones, interpreted."""

    def __call__(self, *arguments: Any, **settings: Any) -> AscendBlockTables:
        name = "fused_slots.block_tables.backend_class"
        with mock.patch(name, return_value=InterpretedAscend):
            return super().__call__(*arguments, **settings)


class _Unsuited(Exception):
    """A configuration that the backend refuses, or whose faults would need details."""


def simulate_lives_on(
    backend: type[AscendOperations], num_lives: int, steps: int, first_seed: int = 0
) -> Report:
    """Simulate lives of small managers on a backend, leaving out unsuited configurations.

    The Ascend backend records no details of faults and refuses int64 slots of unknown pools.
    """

    def make(config: Config) -> AscendBlockTables:
        if config.checked:
            raise _Unsuited
        with mock.patch("fused_slots.block_tables.backend_class", return_value=backend):
            try:
                return make_manager(config)
            except ConfigurationError as error:
                if not error.argument.startswith("slot_dtype=torch.int64"):
                    raise
                raise _Unsuited from error

    target = Target(backend.name, make, features=FEATURES | OFFERED)
    report, seed, lives = Report(), first_seed, 0
    while lives < num_lives:
        try:
            report.add(simulate(target, seed, steps, "small"))
            lives += 1
        except SimulationError as error:
            if not isinstance(error.__cause__, _Unsuited):
                raise
        seed += 1
    return report
