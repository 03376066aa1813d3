"""What a program did, in figures that need no clock."""

from __future__ import annotations

from dataclasses import dataclass

REPEAT_BYTES = 256


@dataclass
class Counts:
    """Dynamic work of one program.

    `scalar_ops`: integer, compare, select and affine operations and single-element loads and
    stores; constants and address views are free. `casts`: changes of an integer's width, which
    another compiler may or may not need an instruction for. `vector_calls`: library calls on
    910B, vector functions on 950. `vector_repeats`: 256-byte steps of the vector unit.
    """

    scalar_ops: int = 0
    casts: int = 0
    vector_calls: int = 0
    vector_repeats: int = 0
    gm_scalar_loads: int = 0
    gm_scalar_stores: int = 0
    dma_transfers: int = 0
    dma_bytes: int = 0
    atomics: int = 0
    flags: int = 0
    barriers: int = 0

    def add(self, other: Counts, times: int = 1) -> None:
        mine, theirs = self.__dict__, other.__dict__
        for name, value in theirs.items():
            mine[name] += value * times

    def vector(self, nbytes: int, passes: int = 1) -> None:
        self.vector_calls += 1
        self.vector_repeats += passes * -(-nbytes // REPEAT_BYTES)

    def transfer(self, nbytes: int) -> None:
        self.dma_transfers += 1
        self.dma_bytes += nbytes


_SCALAR_DIALECTS = ("arith.", "affine.", "llvm.", "math.")
_CASTS = {
    "arith.index_cast", "arith.extsi", "arith.extui", "arith.trunci", "llvm.sext", "llvm.zext",
    "llvm.trunc",
}  # fmt: skip
_FREE = {
    "arith.constant", "llvm.mlir.constant", "llvm.extractvalue", "llvm.getelementptr",
    "llvm.alloca", "llvm.bitcast", "llvm.mlir.undef", "llvm.insertvalue",
}  # fmt: skip
_ACCESSES = {"memref.load", "memref.store"}
_FLAGS = {"hivm.hir.set_flag", "hivm.hir.wait_flag"}


def static_counts(names: list[str]) -> Counts:
    """Counts of a straight line of operations, library calls left out: they count themselves."""
    counts = Counts()
    for name in names:
        if name in _CASTS:
            counts.casts += 1
        elif name in _ACCESSES or (name.startswith(_SCALAR_DIALECTS) and name not in _FREE):
            counts.scalar_ops += 1
        elif name in _FLAGS:
            counts.flags += 1
        elif name == "hivm.hir.pipe_barrier":
            counts.barriers += 1
        elif name.startswith("hivm_regbaseintrins."):
            counts.vector_repeats += "pge" not in name
    return counts
