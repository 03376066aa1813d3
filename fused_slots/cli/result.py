"""What a command hands back, and the types that its module shares with the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from fused_slots.groups import ContextParallel

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = "Callable[[argparse.Namespace], Result]"


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


def add_command(commands: Commands, name: str, run: Run, summary: str) -> argparse.ArgumentParser:
    """Add a command that `run` carries out."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def add_context_parallel(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a ContextParallel."""
    parser.add_argument("--cp-size", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--cp-rank", type=int, default=0, help="this rank")
    parser.add_argument(
        "--cp-interleave", type=int, default=1, help="consecutive tokens on one rank"
    )


def context_parallel(args: argparse.Namespace) -> ContextParallel:
    """The ContextParallel of the options.

    Raises:
        ConfigurationError: the numbers do not fit together.
    """
    return ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave)
