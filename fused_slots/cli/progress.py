"""Progress on standard error, for whoever waits for a command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")

# Names and events of a file are printed as they are, but for what would steer the terminal.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def with_progress(
    args: argparse.Namespace, items: Iterable[T], total: int, name: str
) -> Iterator[T]:
    """Pass `items` through with a progress bar: rich's on a terminal, a line a tenth elsewhere."""
    stream, name = sys.stderr, printable(name)
    if args.json:
        yield from items
    elif stream.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import track

        yield from track(
            items,
            description=escape(name),
            total=total,
            console=Console(file=stream),
            transient=True,
        )
    else:
        every = max(total // 10, 1)
        for index, item in enumerate(items, start=1):
            yield item
            if index % every == 0 or index == total:
                announce(args, f"{name}: step {index} of {total}")


def announce(args: argparse.Namespace, text: str) -> None:
    """Say what a command is about to spend seconds on."""
    if not args.json:
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text`, in which control characters are spelled out."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
