"""What a command hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Status(IntEnum):
    """Exit statuses of the command line; 2, wrong use, is an exception's."""

    GOOD = 0
    FINDING = 1


@dataclass(frozen=True)
class Result:
    """A command's outcome: `text` for people, `document` for `--json`."""

    status: Status
    document: Mapping[str, Any]
    text: str
