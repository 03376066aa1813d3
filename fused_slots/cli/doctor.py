"""The doctor and warmup commands: is this machine fit to run, and what would be compiled."""

from __future__ import annotations

import argparse

from fused_slots.block_tables import AscendBlockTables
from fused_slots.cli.result import Commands, Result, Status, add_command
from fused_slots.groups import KVCacheGroup, SlotMappingMode
from fused_slots.inspect.ascend_gate import run_ascend_gate
from fused_slots.inspect.doctor import Diagnosis, diagnose


def add_commands(commands: Commands) -> None:
    """Add doctor and warmup."""
    parser = add_command(
        commands,
        "doctor",
        run_doctor,
        "list versions, usable backends and settings; say what to fix",
    )
    parser.add_argument(
        "--ascend",
        action="store_true",
        help="also compile every kernel variant for Ascend (in the environment of tests/ascend)",
    )
    parser = add_command(
        commands,
        "warmup",
        run_warmup,
        "compile every kernel variant of a hybrid model and list them",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:i] or npu[:i]")
    parser.add_argument("--max-num-reqs", type=int, default=256, help="rows")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="capacity")


def run_doctor(args: argparse.Namespace) -> Result:
    """Diagnose; a problem is a finding."""
    diagnosis = diagnose()
    gate = run_ascend_gate() if args.ascend else None
    if gate is not None and not gate.passed:
        diagnosis.problems.append(f"Ascend compile gate: {gate.report}")
    document: dict[str, object] = {
        "good": not diagnosis.problems,
        "versions": diagnosis.versions,
        "backends": diagnosis.backends,
        "staging": diagnosis.staging,
        "vllm_plugin": diagnosis.vllm_plugin,
        "environment": diagnosis.environment,
        "problems": diagnosis.problems,
    }
    if gate is not None:
        document["ascend_gate"] = gate.report
    status = Status.FINDING if diagnosis.problems else Status.GOOD
    text = _text(diagnosis)
    return Result(status, document, f"{text}\nAscend\n  {gate.report}" if gate else text)


def run_warmup(args: argparse.Namespace) -> Result:
    """Warm up a manager of one group of each kind."""
    tables = AscendBlockTables.from_groups(
        [
            KVCacheGroup(block_size=16, max_num_blocks=2048, name="full"),
            KVCacheGroup(
                block_size=64,
                kernel_block_size=32,
                max_num_blocks=512,
                sliding_window_reach=1023,
                name="sliding",
            ),
            KVCacheGroup(
                block_size=4096,
                max_num_blocks=1,
                slot_mapping_mode=SlotMappingMode.NONE,
                name="state",
            ),
            KVCacheGroup(
                block_size=8, max_num_blocks=1, circular=True, prefix_cacheable=False, name="ring"
            ),
        ],
        max_num_reqs=args.max_num_reqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        device=args.device,
    )
    report = tables.warmup()
    document = {
        "device": str(tables.device),
        "seconds": report.seconds,
        "variants": list(report.variants),
    }
    head = f"{len(report.variants)} variants on {tables.device} in {report.seconds:.2f} s"
    if not report.variants:
        head += " (this backend compiles nothing)"
    return Result(Status.GOOD, document, "\n".join([head, *report.variants]))


def _text(diagnosis: Diagnosis) -> str:
    return "\n".join(
        [
            "Versions",
            *(f"  {name:<24}{version}" for name, version in diagnosis.versions.items()),
            "Backends",
            *(f"  {name:<24}{state}" for name, state in diagnosis.backends.items()),
            "Staging of appends",
            f"  {diagnosis.staging}",
            "vLLM plugin",
            f"  {diagnosis.vllm_plugin}",
            "Environment",
            *(f"  {name:<24}{value}" for name, value in diagnosis.environment.items()),
            "Problems" if diagnosis.problems else "No problem found",
            *(f"  {problem}" for problem in diagnosis.problems),
        ]
    )
