"""Launch through the installed Triton's own launcher and a stub of the driver; print what arrived.

A process of its own, because Triton keeps the first driver it finds:

    python -m tests.kernels.stub_launches FOLDER OWN_CALL

FOLDER receives the stub. With OWN_CALL=1 launches go through the launcher object's own call, as
where the launcher is not known. Prints a JSON object; see `main`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fused_slots import KVCacheGroup
from fused_slots.backends import cuda
from tests.kernels.offline import make_offline

STREAM = 0x5EED0


class Arrived(ctypes.Structure):
    """`struct launch` of stub_cuda.c."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64 * 128),
    )


def build_stub(folder: Path) -> ctypes.CDLL:
    """Compile the stub and load it under the driver's name, before anybody asks for a driver."""
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("stub_cuda.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    stub.stub_last.restype = ctypes.POINTER(Arrived)
    return stub


def play_torch() -> None:
    """What Triton and the launcher ask of torch's CUDA half, which a CPU build lacks."""
    for module, answers in (
        (torch.cuda, {"is_available": True, "current_device": 0, "get_device_capability": (9, 0),
                      "device": nullcontext(), "set_device": None}),
        (torch._C, {"_cuda_getCurrentRawStream": STREAM, "_cuda_getDevice": 0}),
    ):  # fmt: skip
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer: answer)


class Noting(cuda.CudaLauncher):
    """The launcher under test; notes each launch as asked for and as it arrived."""

    def __init__(self, stub: ctypes.CDLL) -> None:
        super().__init__(torch.device("cuda", 0))
        self.stub = stub
        self.launches: list[dict[str, Any]] = []

    def prepare(self, binding):  # type: ignore
        launch = super().prepare(binding)
        variant = binding.variant
        constants = dict(variant.constants)
        names = [name for name in binding.kernel.arg_names if name not in constants]
        function = self._kernels[-1].function
        ptx = self._kernels[-1].asm["ptx"]
        declared = re.findall(r"\.param (\.\w+)", ptx.split(")")[0])

        def note(programs: int, tensors: Any, numbers: Any) -> None:
            self.stub.stub_expect(len(declared))
            before = self.stub.stub_launches()
            launch(programs, tensors, numbers)
            last = self.stub.stub_last().contents
            values = [
                value if type_.endswith("64") else ctypes.c_int32(value & 0xFFFFFFFF).value
                for value, type_ in zip(last.parameters, declared, strict=False)
            ]
            arguments = [*tensors, *numbers, *binding.tensors, *binding.numbers]
            asked = [a.data_ptr() if torch.is_tensor(a) else a for a in arguments]
            self.launches.append(
                {
                    "kernel": str(variant),
                    "count": self.stub.stub_launches() - before,
                    "asked": dict(zip(names, asked, strict=True)),
                    "asked_grid": [binding.num_groups, programs, 1],
                    "asked_threads": 32 * variant.num_warps,
                    "asked_function": function,
                    "arrived": values,
                    "grid": list(last.grid),
                    "block": list(last.block),
                    "stream": last.stream,
                    "function": last.function,
                }
            )

        return note


def call_everything(launcher: Noting) -> None:
    """Each kernel in each of its forms, with sizes that differ from each other."""
    ring = KVCacheGroup(8, 1, circular=True, prefix_cacheable=False)
    groups = [KVCacheGroup(16, 4), KVCacheGroup(12, 4), ring]
    index, starts = torch.tensor([3, 1]), torch.tensor([0, 2, 5], dtype=torch.int32)
    positions = torch.arange(5)
    for plan in ("auto", "by_request"):
        with mock.patch.dict(os.environ, {"FUSED_SLOTS_PLAN": plan}):
            tables = make_offline(lambda: launcher, groups, replay_window=7)
        if plan == "auto":
            tables.append_block_ids(3, ([1], [2], [3]), overwrite=True)
            computed = torch.zeros(8, dtype=torch.int32)
            tables.step(index, starts, positions, num_computed_tokens=computed)
            tables.map_tokens(index.int(), positions[:2])
            out = [torch.zeros_like(table) for table in tables.input_block_tables]
            tables.gather_block_tables(index, 4, out=out)
        tables.compute_slot_mappings(index, starts, positions, 7, replay_start=index.int())


def main() -> None:
    folder, own_call = Path(sys.argv[1]), sys.argv[2] == "1"
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    stub = build_stub(folder)
    play_torch()
    import triton

    launcher = Noting(stub)
    prepared = cuda.prepared_call
    calls: list[cuda.PreparedCall] = []

    def note_call(run: Any, metadata: Any) -> cuda.PreparedCall:
        call = prepared(run, metadata)
        if own_call:
            call = cuda.PreparedCall(run, (metadata, None, None, None), packed=False)
        calls.append(call)
        return call

    with mock.patch.object(cuda, "prepared_call", note_call):
        call_everything(launcher)
    print(
        json.dumps(
            {
                "triton": triton.__version__,
                "known": [call.known for call in calls],
                "own_call": [call.start in {k.run for k in launcher._kernels} for call in calls],
                "unloads": stub.stub_unloads(),
                "launches": launcher.launches,
            }
        )
    )


if __name__ == "__main__":
    main()
