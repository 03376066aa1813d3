"""What a command hands back, and what it must know before it begins."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from fused_slots.faults import InvalidArgumentError


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


def check_writable(path: Path, inputs: Iterable[str] = ()) -> None:
    """Find out before the work whether its result can be written; nothing is created.

    Raises:
        InvalidArgumentError: it is one of the files that are to be read.
        OSError: the folder does not exist, or the file or the folder may not be written.
    """
    if path.exists() and any(Path(name).exists() and path.samefile(name) for name in inputs):
        raise InvalidArgumentError(
            "--output", expected="another file than those that are read", actual=str(path)
        )
    if str(path) == "-":
        raise InvalidArgumentError("--output", expected="a file", actual="-, which is none here")
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole: interrupted, or on a full disk, it leaves nothing.

    Raises:
        OSError: it cannot be written.
    """
    try:
        path.write_bytes(content)
    except BaseException as error:
        with suppress(OSError):
            if path.is_file():
                path.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
