"""Binding a variant launches it once, and that launch changes no memory."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

from fused_slots import AscendBlockTables, block_tables
from fused_slots.backends.interpreter import InterpreterBackend
from fused_slots.backends.launch import nothing
from tests.kernels.ascend_forms import InterpretedAscend
from tests.kernels.resources import CONFIGURATIONS

BACKENDS = {"gpu": InterpreterBackend, "ascend": InterpretedAscend}


def backend_with_traces(backend: str, configuration: str) -> Any:
    """A backend each of whose tensors holds something that padding or a fault would change."""
    settings = {"max_num_reqs": 8, "max_num_batched_tokens": 64, **CONFIGURATIONS[configuration]}
    groups = settings.pop("groups")
    plan = "by_request" if configuration == "by request" else "auto"
    with (
        mock.patch.dict(os.environ, {"FUSED_SLOTS_PLAN": plan}),
        mock.patch.object(block_tables, "backend_class", return_value=BACKENDS[backend]),
    ):
        made = AscendBlockTables.from_groups(groups, **settings)._backend
    for name, tensor in tensors_of(made).items():
        if "descriptor" not in name:
            tensor.copy_(torch.arange(5, 5 + tensor.numel()).view(tensor.shape))
    return made


def tensors_of(backend: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(backend).items() if torch.is_tensor(value)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_warmup_launches_each_variant_and_changes_nothing(backend: str, configuration: str) -> None:
    made = backend_with_traces(backend, configuration)
    before = {name: tensor.clone() for name, tensor in tensors_of(made).items()}
    launched = []
    prepare = made.launcher.prepare

    def counted(binding: Any) -> Any:
        launch = prepare(binding)

        def note(*arguments: Any) -> None:
            launched.append(str(binding.variant))
            launch(*arguments)

        return note

    with mock.patch.object(made.launcher, "prepare", counted):
        report = made.warmup()
    assert launched == report.variants
    for name, tensor in tensors_of(made).items():
        assert torch.equal(tensor, before[name]), name


def test_a_kernel_without_padding_programs_is_refused() -> None:
    with pytest.raises(TypeError, match="num_pad"):
        nothing(["slots_ptr", "num_tiles"], ["*i32", "i32"], torch.device("cpu"))
