"""The `fused-slots` command: one module per subject, one `Result` per command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from fused_slots.cli import bench, doctor, explain, schedules
from fused_slots.faults import BlockTableError

_EPILOG = "Exit status: 0 good, 1 a finding, 2 wrong use."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; None = those of the process.

    Returns:
        The exit status: 0 good, 1 a finding, 2 wrong use.
    """
    args = build_parser().parse_args(argv)
    try:
        result = args.run(args)
        print(json.dumps(result.document, indent=2) if args.json else result.text, flush=True)
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BlockTableError as error:
        return _refuse(args.command, str(error))
    except OSError as error:
        return _refuse(args.command, f"{error.filename or 'output'}: {error.strerror or error}")
    return int(result.status)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="fused-slots",
        description="Block tables and slot mappings of all KV cache groups, looked at from outside",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (schedules, explain, doctor, bench):
        module.add_commands(commands)
    for command in commands.choices.values():
        command.epilog = _EPILOG
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _refuse(command: str, message: str) -> int:
    print(f"fused-slots {command}: {message}", file=sys.stderr)
    return 2
