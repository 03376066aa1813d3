"""The explain command: derive slots from numbers given on the command line."""

from __future__ import annotations

import argparse

from fused_slots.block_tables import AscendBlockTables
from fused_slots.cli.result import Result, Status
from fused_slots.groups import ContextParallel, KVCacheGroup, SlotMappingMode
from fused_slots.recording.oracles import FAULTS

_MODES = {"token": SlotMappingMode.TOKEN_TO_KV_SLOT, "none": SlotMappingMode.NONE}


def run_explain(args: argparse.Namespace) -> Result:
    """Derive each position's slot; a fault is a finding."""
    group = KVCacheGroup(
        block_size=args.block_size,
        kernel_block_size=args.kernel_block_size,
        max_num_blocks=max(len(args.blocks), 1),
        slot_mapping_mode=_MODES[args.mode],
        circular=args.circular,
        dcp_sharded=False if args.replicated else None,
        prefix_cacheable=False if args.not_prefix_cacheable else None,
    )
    tables = AscendBlockTables.from_groups(
        [group],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        context_parallel=ContextParallel(args.cp_size, args.cp_rank, args.cp_interleave),
        replay_window=args.replay_window,
        null_block_id=args.null_block_id,
    )
    tables.append_block_ids(0, (args.blocks,), overwrite=True)
    tables.apply_staged_writes()
    row = -1 if args.dummy else 0
    derivations = [
        tables.explain(0, row, position, args.replay_start) for position in args.positions
    ]
    faulty = any(derivation.outcome in FAULTS for derivation in derivations)
    document = {
        "tokens": [
            {
                "position": position,
                "slot": derivation.slot,
                "outcome": derivation.outcome.name.lower(),
                "derivation": list(derivation.lines),
            }
            for position, derivation in zip(args.positions, derivations, strict=True)
        ]
    }
    text = "\n\n".join(map(str, derivations))
    return Result(Status.FINDING if faulty else Status.GOOD, document, text)
