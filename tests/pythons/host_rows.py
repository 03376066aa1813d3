"""Rows and staged writes under another Python, with NumPy alone: prints a digest of what they hold.

    python tests/pythons/host_rows.py native|python

torch is not installed there: of it the host's rows use two names of dtypes, which stand in below.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from random import Random
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def without_torch() -> None:
    """`fused_slots` as a package whose __init__, which imports torch, has not run."""
    package = ModuleType("fused_slots")
    package.__path__ = [str(ROOT / "fused_slots")]
    torch = ModuleType("torch")
    torch.dtype, torch.int32, torch.int64 = str, "int32", "int64"
    torch.Tensor = torch.device = object
    sys.modules.update(fused_slots=package, torch=torch)


def main() -> None:
    half = os.environ["FUSED_SLOTS_HOST"] = sys.argv[1]
    without_torch()
    import torch

    from fused_slots.faults import BlockTableError
    from fused_slots.groups import ContextParallel, KVCacheGroup
    from fused_slots.host.rows import HostRows, host_half
    from fused_slots.layout import TableLayout

    assert host_half() == half
    groups = (KVCacheGroup(16, 6), KVCacheGroup(32, 5, kernel_block_size=16))
    layout = TableLayout(
        groups=groups,
        widths=(6, 10),
        max_num_reqs=4,
        max_num_batched_tokens=4,
        context_parallel=ContextParallel(),
        replay_window=0,
        slot_dtype=torch.int64,
        num_blocks=(30, None),
    )
    rows, rng, digest, refused = HostRows(layout), Random(0), hashlib.sha256(), 0
    for _ in range(20_000):
        row = rng.randrange(-1, 5)
        ids = [[rng.randrange(-1, 33) for _ in range(rng.randrange(4))] for _ in groups]
        try:
            if rng.random() < 0.2:
                rows.clear_row(row)
            else:
                rows.stage(row, ids, rng.random() < 0.5)
        except BlockTableError as error:
            digest.update(str(error).encode())
            refused += 1
        if rng.random() < 0.1:
            digest.update(repr(rows.collect()).encode())
            rows.clear()
    assert 1_000 < refused < 19_000
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
