"""What parts say while they run, and when they find what must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Note = Callable[[dict[str, Any]], None]
"""Writes down what a part has found so far, which stays if it is ended."""


class Wrong(Exception):
    """A part found what must not be; `found` is its result all the same."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(str(found))
        self.found = found


def wrong_if(condition: object, found: dict[str, Any]) -> dict[str, Any]:
    """The result. Raises Wrong."""
    if condition:
        raise Wrong(found)
    return found
