"""The warmup command: what would be compiled on a device, and how long that takes."""

from __future__ import annotations

import argparse

from fused_slots.block_tables import AscendBlockTables
from fused_slots.cli.progress import announce
from fused_slots.cli.result import Result, Status
from fused_slots.groups import KVCacheGroup, SlotMappingMode


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
    announce(args, f"warmup: compiling for {tables.device}")
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
