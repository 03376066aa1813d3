"""Kernels compiled to machine code for a GPU that this machine does not have."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fused_slots import AscendBlockTables, block_tables
from fused_slots.backends.device import Uploads
from fused_slots.backends.gpu import GpuBackend
from fused_slots.backends.interpreter import HostPackets
from fused_slots.backends.launch import (
    Binding,
    Launch,
    Launcher,
    Variant,
    kernel_source,
)

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""What kernels are compiled for: Triton's backend, its architecture, threads of a warp."""

NVIDIA = [name for name, (backend, *_) in TARGETS.items() if backend == "cuda"]
"""Those that the package serves."""


@dataclass(frozen=True)
class Machine:
    """One compiled variant: its assembly, and what the assembler says of its machine code."""

    assembly: str
    registers: int
    """Of a thread; on AMD its vector registers."""
    spilled_bytes: int
    """Bytes of local memory that a thread uses."""
    shared_bytes: int
    instructions: int = 0
    """Of its machine code, without padding; not counted on AMD."""

    @property
    def usage(self) -> dict[str, int]:
        """What is recorded of it."""
        return {
            "registers": self.registers,
            "spilled": self.spilled_bytes,
            "shared": self.shared_bytes,
            "instructions": self.instructions,
        }


class OfflineLauncher(Launcher):
    """Compiles what it is asked to bind and keeps the result; a launch does nothing.

    Args:
        target: one of TARGETS.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.machines: dict[Variant, Machine] = {}

    def prepare(self, binding: Binding) -> Launch:
        import triton
        from triton.backends.compiler import GPUTarget

        variant, target = binding.variant, GPUTarget(*TARGETS[self.target])
        options = variant.cuda_options
        if target.backend == "hip":
            options = {"num_warps": variant.num_warps}  # there is no maxnreg
        compiled = triton.compile(kernel_source(binding), target=target, options=options)
        if target.backend == "hip":
            assembly, usage = compiled.asm["amdgcn"], amd_resource_usage(compiled.asm["amdgcn"])
            length = 0
        else:
            assembly, usage = compiled.asm["ptx"], resource_usage(compiled.asm["cubin"])
            length = instructions(compiled.asm["cubin"])
        self.compiled += 1
        self.machines[variant] = Machine(assembly, *usage, compiled.metadata.shared, length)
        return lambda programs, tensors, numbers: None


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of each thread, as cuobjdump reads them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump names {len(found)} kernels:\n{report}")
    registers, stack, local = map(int, found[0])
    return registers, stack + local


EXECUTABLE = 4  # of an ELF section's flags
NOP = 0x918  # in the low 12 bits of an instruction of 16 bytes, since sm_70


def instructions(cubin: bytes) -> int:
    """Machine instructions of a kernel, without the NOPs that fill it up."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count = struct.unpack_from("<HH", cubin, 0x3A)
    found = 0
    for header in range(table, table + entry * count, entry):
        flags, _, offset, size = struct.unpack_from("<QQQQ", cubin, header + 8)
        if flags & EXECUTABLE:
            words = struct.iter_unpack("<Q8x", cubin[offset : offset + size])
            found += sum(word & 0xFFF != NOP for (word,) in words)
    return found


def amd_resource_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of private memory of each thread, from the kernel's metadata."""
    found = [
        re.findall(rf"^\s+\.{name}:\s+(\d+)$", assembly, re.MULTILINE)
        for name in ("vgpr_count", "private_segment_fixed_size")
    ]
    if any(len(numbers) != 1 for numbers in found):
        raise RuntimeError(f"metadata of {[len(numbers) for numbers in found]} kernels")
    registers, private = (int(numbers[0]) for numbers in found)
    return registers, private


def offline_backend(make: Any) -> type[GpuBackend]:
    """A backend in host memory whose launcher `make()` builds."""

    class OfflineBackend(GpuBackend):
        name = "offline"
        reads_tensors_on_host = False

        def make_launcher(self) -> Launcher:
            launcher: Launcher = make()
            return launcher

        def make_uploads(self) -> Uploads:
            return HostPackets()

        def synchronize(self) -> None:
            pass

    return OfflineBackend


def make_offline(make_launcher: Any, groups: Sequence[Any], **settings: Any) -> AscendBlockTables:
    """A manager whose backend binds variants with `make_launcher()`'s launcher."""
    backend = offline_backend(make_launcher)
    sizes = {"max_num_reqs": 8, "max_num_batched_tokens": 64}
    with mock.patch.object(block_tables, "backend_class", return_value=backend):
        return AscendBlockTables.from_groups(groups, **{**sizes, **settings})
