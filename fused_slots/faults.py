"""What can go wrong: typed errors raised on the host, and faults counted on the device.

An error stops a call before anything changed. A fault is counted where the host cannot look: the
device makes the access safe (PAD instead of a slot, zero instead of a row) and counts it, because
a healthy engine causes some (captured drafts over empty rows, groups whose slots nobody reads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import numpy as np
import numpy.typing as npt

INT32_MAX = 2**31 - 1

FAULT_DETAILS = 64
"""Faults that checked mode records one by one between two reads."""


class BlockTableError(ValueError):
    """Base of every error that a caller of this package can meet.

    Args:
        argument: the argument or field that was refused, as the caller wrote it.
        expected: what would have been accepted.
        actual: what came.
        hint: the setting to change, or what to do; optional.
    """

    def __init__(self, argument: str, *, expected: str, actual: str, hint: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.actual = actual
        self.hint = hint
        super().__init__(argument, expected, actual, hint)

    def within(self, place: str) -> BlockTableError:
        """The same error with the place that it was found in before its argument."""
        argument = f"{place}: {self.argument}"
        return type(self)(argument, expected=self.expected, actual=self.actual, hint=self.hint)

    def __reduce__(self) -> tuple[Callable[..., BlockTableError], tuple[str]]:
        # An engine's worker sends its errors to another process; keywords do not survive `args`.
        build = partial(type(self), expected=self.expected, actual=self.actual, hint=self.hint)
        return build, (self.argument,)

    def __str__(self) -> str:
        text = f"{self.argument}: expected {self.expected}; got {self.actual}"
        return f"{text}. {self.hint}" if self.hint else text


class ConfigurationError(BlockTableError):
    """A group, a size or a setting that no manager can be built from."""


class InvalidArgumentError(BlockTableError):
    """A tensor or number of one call has the wrong shape, dtype, device or range."""


class RowCapacityError(BlockTableError):
    """A request would hold more blocks than its row has columns."""


class BlockIdError(BlockTableError):
    """A block id is negative, outside the pool, or has slots outside the slot dtype."""


class IntegrityError(BlockTableError):
    """`check_integrity` found broken invariants; the message lists each of them."""


class BackendUnavailableError(BlockTableError):
    """The device was asked for, but a package, a driver or the device itself is missing."""


class FaultCode(IntEnum):
    """Why the device padded a token, or zeroed a gathered row, that the caller wanted mapped."""

    COLUMN_OUT_OF_ROW = 1
    """The token's column is at or beyond the number of columns that its row has filled."""

    EMPTY_RING = 2
    """The token belongs to a circular group whose row holds no block."""

    ROW_OUT_OF_RANGE = 3
    """idx_mapping names a row >= max_num_reqs."""

    TOKENS_OVER_CAPACITY = 4
    """query_start_loc ends beyond the output's width (or the positions given); the rest is cut."""

    NULL_BLOCK = 5
    """The token's column, or its ring, holds the manager's null block."""

    TOKENS_OVER_VIEW = 6
    """query_start_loc names more tokens than num_tokens_padded: the view returned is too narrow.

    Counted once for each group and call, as all tokens are mapped."""

    DUPLICATE_POSITION = 7
    """Checked mode: one request has this token's position twice in one call."""


@dataclass(frozen=True)
class Fault:
    """Faults of one code in one group since the last `take_faults`.

    `count` is in tokens (for ROW_OUT_OF_RANGE also gathered rows, whose token is -1). Unchecked,
    `row`, `token` and `position` are -1. In checked mode the first faults come one by one, each
    with count 1 and its place: `row` the request's row, `token` its index in the batch.
    `group_name` is the group's own, "" if it has none.
    """

    code: FaultCode
    group: int
    count: int
    row: int = -1
    token: int = -1
    position: int = -1
    group_name: str = field(default="", compare=False)

    def __str__(self) -> str:
        meaning = (FaultCode(self.code).name).lower().replace("_", " ")
        where = (
            f" at row {self.row}, token {self.token}, position {self.position}"
            if self.row >= 0 or self.token >= 0
            else ""
        )
        name = f" ({self.group_name})" if self.group_name else ""
        return f"{self.count} x {meaning} in group {self.group}{name}{where}"


def fault_records(counts: npt.NDArray[np.int64], detailed: Sequence[Fault]) -> list[Fault]:
    """The first faults one by one, then one record per (code, group) for the rest.

    Args:
        counts: int64 [codes + 1, G], all faults.
        detailed: those of them that were recorded with their place, each with count 1.
    """
    rest = counts.copy()
    for fault in detailed:
        rest[fault.code, fault.group] -= fault.count
    return [
        *detailed,
        *(
            Fault(FaultCode(int(code)), int(g), int(rest[code, g]))
            for code, g in np.argwhere(rest > 0)
        ),
    ]


def require_int(argument: str, value: object, *, minimum: int, maximum: int = INT32_MAX) -> int:
    """`value`, a Python or NumPy integer, as a Python int in [minimum, maximum].

    Raises:
        ConfigurationError: it is not an int, or out of range.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ConfigurationError(argument, expected="an int", actual=repr(value))
    if not minimum <= value <= maximum:
        raise ConfigurationError(
            argument, expected=f"an int in [{minimum}, {maximum}]", actual=str(value)
        )
    return int(value)


def require_bool(argument: str, value: object) -> bool:
    """`value`, a Python or NumPy bool, as a Python bool.

    Raises:
        ConfigurationError: it is anything else, whatever its truth value.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigurationError(argument, expected="True or False", actual=repr(value))
    return bool(value)
