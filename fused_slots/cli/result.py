"""What a command hands back, and what it must know before it begins."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any


class Status(IntEnum):
    """Exit statuses of the command line; 2, wrong use, is mostly an exception's."""

    GOOD = 0
    FINDING = 1
    WRONG_USE = 2
    INTERRUPTED = 130


@dataclass(frozen=True)
class Result:
    """A command's outcome: `text` for people, `document` for `--json`, `error` in either case."""

    status: Status
    document: Mapping[str, Any]
    text: str
    error: str = ""


def check_writable(path: Path) -> None:
    """Find out before the work whether its result can be written; nothing is created.

    Raises:
        OSError: the folder does not exist, or the file or the folder may not be written.
    """
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
