"""Every command and its options; what carries a command out is imported when it is chosen.

So `--help` and wrong use answer at once, without torch.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from fused_slots import __version__, env
from fused_slots.cli.result import Result
from fused_slots.recording.shipped import DEFAULT_RECORDING, list_recordings

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_RECORDING = f"a schedule file, or one of {', '.join(list_recordings())}"
_EPILOG = "Exit status: 0 good, 1 a finding, 2 wrong use."


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="fused-slots",
        description="Block tables and slot mappings of all KV cache groups, looked at from outside",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_replay(commands)
    _add_check_and_record(commands)
    _add_report(commands)
    _add_explain(commands)
    _add_doctor_and_warmup(commands)
    _add_plan(commands)
    _add_bench(commands)
    for command in commands.choices.values():
        command.epilog = _EPILOG
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace) -> Result:
    """Carry out the command that was chosen."""
    module, function = args.run.split(":")
    result = getattr(import_module(f"fused_slots.cli.{module}"), function)(args)
    assert isinstance(result, Result)
    return result


def _add(commands: _Commands, name: str, run: str, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def _add_demo(commands: _Commands) -> None:
    parser = _add(
        commands,
        "demo",
        "schedules:run_demo_command",
        "replay a shipped recording, check every slot, draw the tables",
    )
    parser.add_argument(
        "--recording",
        default=DEFAULT_RECORDING,
        help=f"{_RECORDING}; all: every one of these (default: {DEFAULT_RECORDING})",
    )
    _add_max_mib(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        help="folder for pictures, which must exist (default: this one)",
    )
    parser.add_argument("--format", choices=["png", "svg"], default="png", help="of the pictures")
    parser.add_argument("--no-picture", action="store_true", help="draw nothing")
    _add_replay_options(parser, pad_requests_to=8)


def _add_replay(commands: _Commands) -> None:
    parser = _add(commands, "replay", "schedules:run_replay", "replay a recording and check it")
    _add_recordings(parser)
    parser.add_argument(
        "--picture", type=_picture, help="draw the tables to this .png or .svg file"
    )
    _add_replay_options(parser, pad_requests_to=1)


def _add_replay_options(parser: argparse.ArgumentParser, *, pad_requests_to: int) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:i] or npu[:i]")
    parser.add_argument(
        "--backend",
        choices=[choice for choice in env.BACKEND.choices if choice],
        help=f"instead of the device's own ({env.BACKEND.name})",
    )
    parser.add_argument(
        "--replay-window", type=int, default=0, help="tokens replayed after each prefix hit"
    )
    parser.add_argument(
        "--pad-requests-to",
        type=int,
        default=pad_requests_to,
        help="fill batches with dummies to a multiple of this, as captured graphs need "
        f"(default: {pad_requests_to})",
    )
    _add_context_parallel(parser)


def _add_check_and_record(commands: _Commands) -> None:
    parser = _add(
        commands,
        "check",
        "schedules:run_check",
        "check a recording: format, capacity, truth, aliasing",
    )
    _add_recordings(parser)
    parser = _add(
        commands,
        "merge",
        "schedules:run_merge",
        "put the recordings of all context parallel ranks into one file: prove that they are one "
        "job, align their calls, say where ranks part",
    )
    parser.add_argument("recording", nargs="+", help="a flight recording of each rank, any order")
    _add_max_mib(parser)
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        required=True,
        help="schedule file to write (.npz.xz), in a folder that exists",
    )
    parser = _add(
        commands,
        "record",
        "checkout:run_record",
        "record a schedule from vLLM's own scheduler (source checkout, needs vllm)",
    )
    # Each scenario's recording ships under its name.
    parser.add_argument("scenario", choices=list_recordings(), help="what to record")
    parser.add_argument("file", type=Path, help="schedule file to write (.npz.xz)")


def _add_report(commands: _Commands) -> None:
    parser = _add(
        commands,
        "report",
        "report:run_report",
        "check a recording and write it as one HTML page: tables at every step, owners, findings",
    )
    _add_recordings(parser)
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("report.html"),
        help="file to write, in a folder that exists (default: report.html)",
    )
    parser.add_argument(
        "--around",
        type=_count,
        metavar="STEP",
        help="the step to keep where one page cannot hold all (default: the first finding's)",
    )
    parser.add_argument(
        "--page-mib",
        type=_count,
        default=64,
        metavar="N",
        help="limit of the steps that the page holds, in MiB before compression (default: 64)",
    )
    _add_context_parallel(parser)


def _add_explain(commands: _Commands) -> None:
    parser = _add(
        commands, "explain", "explain:run_explain", "derive the slot of a token, number by number"
    )
    parser.add_argument(
        "positions", type=int, nargs="+", metavar="POSITION", help="logical positions"
    )
    parser.add_argument("--block-size", type=int, required=True, help="tokens a block (K)")
    parser.add_argument("--kernel-block-size", type=int, help="tokens a column (B, default K)")
    parser.add_argument(
        "--blocks",
        type=_numbers,
        default=[],
        metavar="ID,ID,...",
        help="the request's allocation blocks, in order",
    )
    parser.add_argument(
        "--mode", choices=["token", "none"], default="token", help="none: a state group"
    )
    parser.add_argument("--circular", action="store_true", help="the block is a ring")
    parser.add_argument("--dummy", action="store_true", help="a dummy request (idx_mapping -1)")
    parser.add_argument(
        "--replicated", action="store_true", help="context parallelism does not shard the group"
    )
    parser.add_argument(
        "--not-prefix-cacheable", action="store_true", help="replayed tokens are written"
    )
    parser.add_argument(
        "--null-block-id", type=int, help="a block that is never written (default: none)"
    )
    parser.add_argument("--replay-window", type=int, default=0, help="replayed tokens")
    parser.add_argument("--replay-start", type=int, default=0, help="first replayed position")
    _add_context_parallel(parser)


def _add_context_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cp-size", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--cp-rank", type=int, default=0, help="this rank")
    parser.add_argument(
        "--cp-interleave", type=int, default=1, help="consecutive tokens on one rank"
    )


def _add_doctor_and_warmup(commands: _Commands) -> None:
    _add(
        commands,
        "doctor",
        "doctor:run_doctor",
        "list versions, usable backends and settings; say what to fix",
    )
    parser = _add(
        commands,
        "warmup",
        "warmup:run_warmup",
        "compile every kernel variant of a hybrid model and list them",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:i] or npu[:i]")
    parser.add_argument("--max-num-reqs", type=int, default=256, help="rows")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="capacity")


def _add_plan(commands: _Commands) -> None:
    parser = _add(
        commands,
        "plan",
        "plan:run_plan",
        "what a decode step costs: bytes, microseconds on an H200 and its host, limits",
    )
    parser.add_argument("--requests", type=int, required=True, help="batch entries, and rows")
    parser.add_argument("--groups", type=int, help="KV cache groups (default: one a block size)")
    parser.add_argument("--context", type=int, required=True, help="tokens of each request")
    parser.add_argument(
        "--block-size",
        type=_numbers,
        default=[16],
        metavar="K,K,...",
        help="tokens a block, group by group; fewer than groups are repeated (default: 16)",
    )
    parser.add_argument(
        "--tokens", type=int, default=1, help="tokens a request and step, drafts included"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="capacity (default: 8192, or as many as the step has)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--slot-dtype", choices=["int64", "int32"], default="int64")


def _add_bench(commands: _Commands) -> None:
    parser = _add(
        commands,
        "bench",
        "checkout:run_bench",
        "time every host path and CPU operation (source checkout)",
    )
    parser.add_argument("--select", help="only benchmarks whose name matches (pytest -k)")
    parser.add_argument("--save", type=Path, help="JSON file to keep every measurement in")


def _add_recordings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording",
        nargs="+",
        help=f"{_RECORDING}; or a flight recording of each context parallel rank",
    )
    _add_max_mib(parser)


def _add_max_mib(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-mib",
        type=_count,
        default=256,
        metavar="N",
        help="limit of what a recording may hold, in MiB (default: 256)",
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"expected a .png or .svg file; got {text!r}")
    return path


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on; got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 3,4,5; got {text!r}") from None
