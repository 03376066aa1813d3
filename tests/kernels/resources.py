"""What each compiled variant needs of a GPU, and its record in resources.json.

Compile everything and record it anew:

    python -m tests.kernels.resources
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode
from tests.kernels.offline import TARGETS, OfflineLauncher, make_offline

RECORD = Path(__file__).with_name("resources.json")

PAGED = KVCacheGroup(16, 64)
SLIDING = KVCacheGroup(32, 64, 16, sliding_window_reach=20)
STATE = KVCacheGroup(4096, 1, slot_mapping_mode=SlotMappingMode.NONE)
RING = KVCacheGroup(8, 1, circular=True, prefix_cacheable=False)
ODD = KVCacheGroup(12, 64)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "paged": {"groups": [PAGED, SLIDING, STATE]},
    "by request": {"groups": [PAGED, SLIDING, STATE]},
    "sizes no powers of two": {"groups": [PAGED, ODD]},
    "context parallel": {"groups": [PAGED], "context_parallel": ContextParallel(4, 1, 8)},
    "ring": {"groups": [PAGED, RING]},
    "replay": {"groups": [PAGED, RING], "replay_window": 4},
    "checked": {"groups": [PAGED, RING], "replay_window": 4, "checked": True},
    "everything": {
        "groups": [PAGED, ODD],
        "context_parallel": ContextParallel(3, 1, 4),
        "replay_window": 4,
        "checked": True,
    },
}
"""Keywords of managers that choose different variants; "by request" with that FUSED_SLOTS_PLAN."""


def compiled(configuration: str, target: str) -> OfflineLauncher:
    """Every variant of a configuration, compiled for a target."""
    plan = "by_request" if configuration == "by request" else "auto"
    with mock.patch.dict(os.environ, {"FUSED_SLOTS_PLAN": plan}):
        tables = make_offline(
            lambda: OfflineLauncher(TARGETS[target]), **CONFIGURATIONS[configuration]
        )
        tables.warmup()
    launcher: OfflineLauncher = tables._backend.launcher
    return launcher


def compiler() -> str:
    """The compiler whose numbers are recorded."""
    import triton

    return f"triton {triton.__version__}"


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def worse(record: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """Variants of one configuration that need more than is recorded, or are not recorded."""
    differences = [f"{name}: recorded, no longer chosen" for name in sorted(record.keys() - found)]
    for name, usage in sorted(found.items()):
        if name not in record:
            differences.append(f"{name}: not recorded")
            continue
        differences += [
            f"{name}: {what} {record[name][what]} -> {value}"
            for what, value in usage.items()
            if value > record[name][what]
        ]
    return differences


def main() -> None:
    variants = {
        target: {
            configuration: {
                str(variant): machine.usage
                for variant, machine in compiled(configuration, target).machines.items()
            }
            for configuration in CONFIGURATIONS
        }
        for target in TARGETS
    }
    record = {"compiler": compiler(), "variants": variants}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RECORD.name}: {sum(len(c) for t in variants.values() for c in t.values())} variants")


if __name__ == "__main__":
    main()
