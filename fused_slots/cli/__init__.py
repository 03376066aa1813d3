"""The `fused-slots` command: the parser, and a module per subject that it imports on demand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from fused_slots.cli.parser import build_parser, run
from fused_slots.cli.progress import printable
from fused_slots.cli.result import Status
from fused_slots.faults import BlockTableError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; None = those of the process.

    Returns:
        The exit status: 0 good, 1 a finding, 2 wrong use, 130 interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        result = run(args)
        text = json.dumps(result.document, indent=2) if args.json else printable(result.text)
        print(text, flush=True)
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.GOOD
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    except BlockTableError as error:
        return _refuse(args.command, str(error))
    except OSError as error:
        return _refuse(args.command, f"{error.filename or 'output'}: {error.strerror or error}")
    if result.error:
        _refuse(args.command, result.error)
    return result.status


def _refuse(command: str, message: str) -> int:
    print(printable(f"fused-slots {command}: {message}"), file=sys.stderr)
    return Status.WRONG_USE
