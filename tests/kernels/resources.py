"""What each compiled variant needs of a GPU, recorded per release of Triton in recorded/.

Compile everything with the Triton installed and record it anew:

    python -m tests.kernels.resources
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from fused_slots import ContextParallel, KVCacheGroup, SlotMappingMode
from tests.kernels.offline import NVIDIA, OfflineLauncher, make_offline

RECORDS = Path(__file__).with_name("recorded")

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
        tables = make_offline(lambda: OfflineLauncher(target), **CONFIGURATIONS[configuration])
        tables._backend.warms_replay = bool(tables.layout.replay_window)
        tables.warmup()
    launcher: OfflineLauncher = tables._backend.launcher
    return launcher


def record_of_this_triton() -> Path:
    """The record of the release installed."""
    import triton

    return RECORDS / f"triton-{triton.__version__}.json"


def moved(record: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """What differs between a configuration's record and what was found, by variant and number."""
    differences = [f"{name}: recorded, no longer chosen" for name in sorted(record.keys() - found)]
    for name, usage in sorted(found.items()):
        if name not in record:
            differences.append(f"{name}: not recorded")
            continue
        differences += [
            f"{name}: {what} {record[name].get(what)} -> {value}"
            for what, value in usage.items()
            if value != record[name].get(what)
        ]
    return differences


def main() -> None:
    path = record_of_this_triton()
    with ProcessPoolExecutor() as processes:
        names = [(configuration, target) for target in NVIDIA for configuration in CONFIGURATIONS]
        found = list(processes.map(usages, *zip(*names, strict=True)))
    variants: dict[str, dict[str, Any]] = {target: {} for target in NVIDIA}
    for (configuration, target), usage in zip(names, found, strict=True):
        variants[target][configuration] = usage
    path.write_text(json.dumps(variants, indent=1) + "\n")
    print(f"{path.name}: {sum(map(len, found))} variants")


def usages(configuration: str, target: str) -> dict[str, dict[str, int]]:
    """What each variant of a configuration uses, by name."""
    machines = compiled(configuration, target).machines
    return {str(variant): machine.usage for variant, machine in machines.items()}


if __name__ == "__main__":
    main()
