"""Results in JSON, read as what somebody else may have written: bounded, and refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fused_slots.faults import BlockTableError

MAX_BYTES = 64 << 20
"""Values take up to twenty times the bytes of their text; shipped results need 1 MB at most."""


class ResultError(BlockTableError):
    """A file of results that cannot be read: too large, nested too deep, or no JSON."""


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a JSON file.

    Args:
        path: the file.
        max_bytes: what is read of it at most.

    Raises:
        ResultError: it is longer, or is no JSON.
        OSError: it cannot be opened.
    """
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ResultError(
            str(path),
            expected=f"at most {max_bytes:,} bytes",
            actual="more",
            hint="If you trust the file, raise max_bytes of read_json",
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        actual = f"{type(error).__name__}: {str(error)[:200]}"
        raise ResultError(str(path), expected="a file of JSON", actual=actual) from error
