"""What a compiled kernel costs by reading it: buffers, loops, calls. Nothing runs here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from .bodies import Library
from .body_costs import is_scalar_loop, of_size
from .counts import static_counts
from .events import collisions
from .parser import Block, Function, Module, Operation

_ELEMENT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "f32": 32}
_TRANSFER = ("load_gm_to_ubuf", "store_ubuf_to_gm")
_ACCESS = ("memref.load", "memref.store")
_TYPICAL = 128  # elements of an operand


@dataclass
class CostReport:
    """Static figures of one kernel; a tile loop is a loop that directly holds library calls.

    `scalar_loops`: loops over single elements of UB that hold no call (the scalar fallback), of
    which `scalar_loops_in_tile_loops` must be zero. `discrete_loops`: loops that access GM element
    by element. `locks`: in-order locks (see library_910); one may hang the device. Nothing is
    multiplied by trip counts: dynamic counts come from executing the kernel.

    What the bodies of library calls hold, where their library can be read: `library_loops`, calls
    that are scalar loops inside, of which `library_loops_in_tile_loops` must be zero;
    `library_waits` for events; `library_events` that are live across a call which uses them;
    `left_padded_loads`, transfers that pad before their first element, which a body's bit field
    holds for 32 bytes only (a mask with a lower bound asks for as many as it likes).
    """

    ub_bytes: int = 0
    tile_loops: int = 0
    scalar_loops: int = 0
    discrete_loops: int = 0
    scalar_loops_in_tile_loops: int = 0
    gm_scalar_loads: int = 0
    vector_calls: int = 0
    vector_calls_in_tile_loops: int = 0
    dma_transfers: int = 0
    scalar_ops: int = 0
    scalar_ops_in_tile_loops: int = 0
    flags: int = 0
    barriers: int = 0
    locks: int = 0
    library_loops: int = 0
    library_loops_in_tile_loops: int = 0
    library_waits: int = 0
    library_events: int = 0
    left_padded_loads: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, int]:
        return {k: v for k, v in asdict(self).items() if k != "calls"}


@dataclass
class _Loop:
    """A loop: the operations directly in it (branches included), and the loops inside."""

    operations: list[Operation] = field(default_factory=list)
    inner: list[_Loop] = field(default_factory=list)


def cost_report(module: Module, library: Library | None = None) -> CostReport:
    """Reads the entry function (and, on 950, the vector functions that it calls)."""
    report = CostReport(ub_bytes=_ub_bytes(module.entry))
    reader = _Reader(module, report, library)
    if library:
        report.library_events = len(collisions(module, library))
    reader.read(_loops(module.entry), in_tile=False, is_loop=False)
    return report


@dataclass
class _Reader:
    module: Module
    report: CostReport
    library: Library | None = None

    def read(self, loop: _Loop, in_tile: bool, is_loop: bool) -> None:
        report = self.report
        static = static_counts([op.name for op in loop.operations])
        vectors = transfers = accesses = 0
        for op in loop.operations:
            if op.callee and op.name.endswith("call"):
                report.calls[op.callee] = report.calls.get(op.callee, 0) + 1
                report.locks += op.callee == "sync_block_lock"
                transfers += op.callee.startswith(_TRANSFER)
                vectors += not op.callee.startswith((*_TRANSFER, "sync_block"))
            accesses += op.name in _ACCESS and "address_space<ub>" in op.text
            report.gm_scalar_loads += op.name == "memref.load" and "address_space<gm>" in op.text
        calls = vectors + transfers
        discrete = is_loop and (
            _is_discrete(loop.operations)
            or (not calls and any(_is_discrete(inner.operations) for inner in loop.inner))
        )
        scalar = is_loop and not discrete and not calls and accesses > 0
        tile = is_loop and not discrete and calls > 0
        report.tile_loops += tile
        report.discrete_loops += discrete
        report.scalar_loops += scalar
        report.scalar_loops_in_tile_loops += scalar and in_tile
        report.vector_calls += vectors
        report.dma_transfers += transfers
        report.scalar_ops += static.scalar_ops
        report.flags += static.flags
        report.barriers += static.barriers
        loops = self._read_library(loop)
        if tile or in_tile:
            report.library_loops_in_tile_loops += loops
            report.vector_calls_in_tile_loops += vectors
            report.scalar_ops_in_tile_loops += static.scalar_ops
        for inner in loop.inner:
            self.read(inner, in_tile or tile, is_loop=True)

    def _read_library(self, loop: _Loop) -> int:
        """Counts what the bodies of a loop's own calls hold; how many are scalar loops."""
        called = [op.callee for op in loop.operations if op.callee and op.name.endswith("call")]
        known = [call for call in called if self.library and self.library.holds(call)]
        if not self.library or not known:
            return 0
        loops = sum(is_scalar_loop(self.library, call) for call in known)
        self.report.left_padded_loads += sum(map(_is_left_padded, loop.operations))
        self.report.library_loops += loops
        self.report.library_waits += sum(
            of_size(self.library, call, _TYPICAL).waits for call in known
        )
        return loops


def _is_left_padded(op: Operation) -> bool:
    """Whether a load's last operand, elements that it pads on the left, is not the constant 0."""
    match = re.match(r"@load_gm_to_ubuf_\w+\([^)]*(%[\w-]+)\)", op.text)
    return bool(match) and match[1] != "%c0"


def _is_discrete(operations: list[Operation]) -> bool:
    """GM accessed an element at a time at computed addresses."""
    if any("DiscreteMemAccess" in op.text for op in operations):
        return any("address_space<gm>" in op.text for op in operations)
    return False


def _ub_bytes(function: Function) -> int:
    """The highest byte of UB that any buffer with a constant address reaches."""
    constants: dict[str, int] = {}
    highest = 0
    for op in function.walk():
        if op.name in ("arith.constant", "llvm.mlir.constant"):
            match = re.match(r"\(?(-?\d+)\b", op.text)
            if match:
                constants[op.results[0]] = int(match.group(1))
        elif op.name == "hivm.hir.pointer_cast" and "address_space<ub>" in op.text:
            inner = re.findall(r"memref<([^,>]*)", op.text)[-1]
            *dims, dtype = inner.split("x")
            size = 1
            for dim in dims:
                size *= int(dim)
            address = constants.get(op.operands[0], 0)
            highest = max(highest, address + -(-size * _ELEMENT_BITS[dtype] // 8))
    return highest


def _loops(function: Function) -> _Loop:
    root = _Loop()
    if len(function.blocks) == 1:
        _structured(function.blocks, root)
    else:
        _graph(function.blocks, root)
    return root


def _structured(blocks: list[Block], loop: _Loop) -> None:
    for block in blocks:
        for op in block.operations:
            loop.operations.append(op)
            into = loop
            if op.name in ("scf.for", "scf.while"):
                into = _Loop()
                loop.inner.append(into)
            for region in op.regions:
                _structured(region, into)


def _graph(blocks: list[Block], root: _Loop) -> None:
    """Back edges of a graph printed in order: blocks between a header and its latch are a loop."""
    labels = {block.label: number for number, block in enumerate(blocks)}
    spans = sorted(_back_edges(blocks, labels), key=lambda span: (span[0], -span[1]))
    stack: list[tuple[int, _Loop]] = [(len(blocks), root)]
    for number, block in enumerate(blocks):
        while number > stack[-1][0]:
            stack.pop()
        while spans and spans[0][0] == number:
            loop = _Loop()
            stack[-1][1].inner.append(loop)
            stack.append((spans.pop(0)[1], loop))
        stack[-1][1].operations.extend(block.operations)


def _back_edges(blocks: list[Block], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    for number, block in enumerate(blocks):
        for target in re.findall(r"\^(\w+)", block.operations[-1].text):
            if labels[target] <= number:
                yield labels[target], number
