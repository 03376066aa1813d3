"""The explain command: derive slots from numbers given on the command line."""

from __future__ import annotations

import argparse

from fused_slots.block_tables import AscendBlockTables
from fused_slots.cli.result import (
    Commands,
    Result,
    Status,
    add_command,
    add_context_parallel,
    context_parallel,
)
from fused_slots.groups import KVCacheGroup, SlotMappingMode
from fused_slots.inspect.judges import FAULTS

_MODES = {"token": SlotMappingMode.TOKEN_TO_KV_SLOT, "none": SlotMappingMode.NONE}


def add_commands(commands: Commands) -> None:
    """Add explain."""
    parser = add_command(
        commands, "explain", run_explain, "derive the slot of a token, number by number"
    )
    parser.add_argument(
        "positions", type=int, nargs="+", metavar="POSITION", help="logical positions"
    )
    parser.add_argument("--block-size", type=int, required=True, help="tokens a block (K)")
    parser.add_argument("--kernel-block-size", type=int, help="tokens a column (B, default K)")
    parser.add_argument(
        "--blocks",
        type=_block_ids,
        default=[],
        metavar="ID,ID,...",
        help="the request's allocation blocks, in order",
    )
    parser.add_argument("--mode", choices=_MODES, default="token", help="none: a state group")
    parser.add_argument("--circular", action="store_true", help="the block is a ring")
    parser.add_argument("--dummy", action="store_true", help="a dummy request (idx_mapping -1)")
    parser.add_argument(
        "--replicated", action="store_true", help="context parallelism does not shard the group"
    )
    parser.add_argument(
        "--not-prefix-cacheable", action="store_true", help="replayed tokens are written"
    )
    parser.add_argument("--replay-window", type=int, default=0, help="replayed tokens")
    parser.add_argument("--replay-start", type=int, default=0, help="first replayed position")
    add_context_parallel(parser)


def run_explain(args: argparse.Namespace) -> Result:
    """Derive each position's slot; a fault is a finding."""
    group = KVCacheGroup(
        block_size=args.block_size,
        kernel_block_size=args.kernel_block_size,
        max_num_blocks=max(len(args.blocks), 1),
        slot_mapping_mode=_MODES[args.mode],
        circular=args.circular,
        dcp_sharded=not args.replicated,
        prefix_cacheable=not args.not_prefix_cacheable,
    )
    tables = AscendBlockTables.from_groups(
        [group],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        context_parallel=context_parallel(args),
        replay_window=args.replay_window,
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


def _block_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 3,4,5; got {text!r}") from None
