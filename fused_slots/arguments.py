"""Checks of what callers pass in, made before anything changes or is launched.

Only shapes, dtypes, devices and layouts are looked at, so a check costs no synchronisation;
contents are looked at where the host can read them for nothing (the CPU backend).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fused_slots.backends.base import Step
from fused_slots.faults import InvalidArgumentError
from fused_slots.layout import TableLayout

INDEX_DTYPES = (torch.int32, torch.int64)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)


def check_vector(
    name: str,
    tensor: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    minimum_length: int = 0,
) -> int:
    """Check a 1-D contiguous tensor and return its length.

    Raises:
        InvalidArgumentError: it is no tensor, or has the wrong dtype, rank, length or device.
    """
    # The shortest way through: every step takes it four times.
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in dtypes
        and tensor.dim() == 1
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and (length := tensor.numel()) >= minimum_length
    ):
        return length
    raise tensor_error(name, tensor, dtypes, device, (minimum_length,)) or InvalidArgumentError(
        name, expected="a contiguous tensor", actual=layout_of(tensor)
    )


def tensor_error(
    name: str,
    tensor: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    minimum_shape: tuple[int, ...],
) -> InvalidArgumentError | None:
    """What is wrong with a tensor's type, dtype, shape or device; None = nothing."""
    if not isinstance(tensor, torch.Tensor):
        expected, actual = "a torch.Tensor", type(tensor).__name__
    elif tensor.dtype not in dtypes:
        expected, actual = " or ".join(map(str, dtypes)), str(tensor.dtype)
    elif len(tensor.shape) != len(minimum_shape) or any(
        size < least for size, least in zip(tensor.shape, minimum_shape, strict=True)
    ):
        sizes = ", ".join(f">= {least}" for least in minimum_shape)
        expected, actual = f"shape [{sizes}]", f"shape {list(tensor.shape)}"
    elif tensor.device != device:
        expected, actual = f"a tensor on {device}", f"one on {tensor.device}"
    else:
        return None
    return InvalidArgumentError(name, expected=expected, actual=actual)


def layout_of(tensor: Any) -> str:
    """How a tensor's elements lie, for an error message."""
    if tensor.layout is torch.strided:
        return f"stride {tensor.stride()}"
    return str(tensor.layout)


def check_count(name: str, value: int, minimum: int, maximum: int, setting: str) -> int:
    """Check a number of requests or tokens against its bounds.

    Args:
        name: the argument.
        value: what came.
        minimum: smallest accepted value.
        maximum: largest accepted value.
        setting: what sets the maximum, for the message.

    Raises:
        InvalidArgumentError: it is not an int in [minimum, maximum].
    """
    if type(value) is int and minimum <= value <= maximum:
        return value
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InvalidArgumentError(name, expected="an int", actual=repr(value))
    if not minimum <= value <= maximum:
        raise InvalidArgumentError(
            name,
            expected=f"a number in [{minimum}, {maximum}]",
            actual=str(value),
            hint=f"The maximum is {setting}",
        )
    return int(value)


def check_gather(
    layout: TableLayout,
    device: torch.device,
    num_reqs: int,
    num_reqs_padded: int,
    out: Sequence[torch.Tensor] | None,
    num_computed_tokens: torch.Tensor | None,
) -> int:
    """Check what a gather of `num_reqs` batch entries is given; return num_reqs_padded as an int.

    Raises:
        InvalidArgumentError: a tensor has the wrong shape, dtype, layout or device, or
            num_reqs_padded is smaller than the batch or larger than the tables.
    """
    limit, setting = layout.max_num_reqs, "max_num_reqs"
    if out is not None:
        limit = min((table.shape[0] for table in out), default=num_reqs)
        setting = "the rows of out"
    if num_reqs > limit:
        raise InvalidArgumentError(
            "idx_mapping",
            expected=f"at most {limit} entries",
            actual=str(num_reqs),
            hint=f"The maximum is {setting}",
        )
    if num_computed_tokens is not None:
        rows = layout.max_num_reqs
        check_vector("num_computed_tokens", num_computed_tokens, _INT32, device, rows)
    return check_count("num_reqs_padded", num_reqs_padded, num_reqs, limit, setting)


def check_tokens(device: torch.device, num_reqs: int, step: Step) -> None:
    """Check the tokens of `num_reqs` batch entries without looking at contents.

    Raises:
        InvalidArgumentError: a tensor has the wrong shape, dtype, layout or device.
    """
    check_vector("query_start_loc", step.query_start_loc, _INT32, device, num_reqs + 1)
    check_vector("positions", step.positions, _INT64, device)
    replay_start, replay_len = step.replay_start, step.replay_len
    if replay_start is not None:
        check_vector("replay_start", replay_start, _INT32, device, num_reqs)
    if replay_len is None:
        return
    if replay_start is None:
        raise InvalidArgumentError(
            "replay_len",
            expected="replay_start beside it: a length says how far from there",
            actual="replay_start=None",
        )
    check_vector("replay_len", replay_len, _INT32, device, num_reqs)


def check_host_visible_batch(num_reqs: int, step: Step, capacity: int) -> None:
    """Check the contents of query_start_loc where the host can read them.

    Raises:
        InvalidArgumentError: it does not start at 0, decreases, or names more tokens than there
            are positions, room for, or columns in the view that is returned.
    """
    query_start_loc, positions = step.query_start_loc, step.positions
    assert query_start_loc is not None
    assert positions is not None
    starts = query_start_loc.numpy()[: num_reqs + 1]
    if starts[0] != 0:
        raise InvalidArgumentError(
            "query_start_loc", expected="0 in its first entry", actual=str(starts[0])
        )
    if np.count_nonzero(starts[1:] < starts[:-1]):
        b = int(np.flatnonzero(np.diff(starts) < 0)[0])
        raise InvalidArgumentError(
            "query_start_loc",
            expected="non-decreasing offsets",
            actual=f"{starts[b]} then {starts[b + 1]} at batch entry {b}",
        )
    num_tokens = int(starts[num_reqs])
    if num_tokens > positions.numel():
        raise InvalidArgumentError(
            "positions",
            expected=f"at least {num_tokens} entries (query_start_loc[{num_reqs}])",
            actual=str(positions.numel()),
        )
    if num_tokens > capacity:
        raise InvalidArgumentError(
            "query_start_loc",
            expected=f"at most {capacity} tokens",
            actual=str(num_tokens),
            hint="max_num_batched_tokens (or the width of out) is the capacity",
        )
    if num_tokens > step.num_tokens_padded:
        raise InvalidArgumentError(
            "num_tokens_padded",
            expected=f"at least {num_tokens}, the tokens of the batch "
            f"(query_start_loc[{num_reqs}])",
            actual=str(step.num_tokens_padded),
            hint="The view that is returned has so many columns, and each token needs one",
        )
