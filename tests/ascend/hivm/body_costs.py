"""What a library call does inside, found by running its body on the CPU.

Bodies are LLVM functions whose control flow depends on sizes, strides and addresses. A call's
functions are cut out of the compiler's bitcode, each instruction of the device is replaced by a
counter, each access of the scalar unit to on-chip memory gets one, and the rest runs as it is. So
nothing is computed here, but how often what would be done is known.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from .bodies import Library

_UB_ACCESS = re.compile(
    r"= load (?!ptr)[\w.]+, ptr addrspace\(6\) %|store (?!ptr)[\w.]+ [^,]+, ptr addrspace\(6\) %"
)
_ATTRIBUTES = re.compile(r",? ![\w.]+ !\d+| #\d+| comdat")
_DECLARED = re.compile(r"declare (\S+) @llvm\.hivm\.([\w.]+)\((.*)\)")
_INSTRUCTION = re.compile(r"V[A-Z]|MOV\.|MOVEV")
_TYPE = re.compile(r"ptr addrspace\(\d+\)|ptr|i\d+|float|half|bfloat")
_NATIVE = {
    "ptr": ctypes.POINTER(ctypes.c_int64), "float": ctypes.c_float, "i1": ctypes.c_int8,
    "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
}  # fmt: skip
_UB_BYTES = 192 * 1024


class BodyCost(NamedTuple):
    """Of one call. `scalar`: accesses of the scalar unit to on-chip memory; `waits`: for events;
    `barriers`: of a pipe; `instructions`: of the vector unit or a transfer."""

    scalar: int
    waits: int
    barriers: int
    instructions: int


@dataclass(frozen=True)
class Memref:
    """An operand on chip: its byte address, and sizes and strides in elements."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


Operand = Memref | int | float


class Body:
    """The body of one library call, runnable.

    Args:
        library: of a 910B.
        call: as it is written in a lowered module.
    """

    def __init__(self, library: Library, call: str) -> None:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        text, self._names = _for_this_machine(library, call)
        machine = binding.Target.from_default_triple().create_target_machine()
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
        self._engine.finalize_object()
        symbol = library.symbol(call)
        parameters = library.functions[symbol].split("(", 1)[1].split(") ", 1)[0]
        self.types = [parameter.split()[0] for parameter in parameters.split(",")]
        kinds = [_NATIVE[kind] for kind in self.types]
        self._run = ctypes.CFUNCTYPE(None, *kinds)(self._engine.get_function_address(symbol))
        self._counts = (ctypes.c_int64 * len(self._names)).from_address(
            self._engine.get_global_value_address("counts")
        )
        self._ub = ctypes.create_string_buffer(2 * _UB_BYTES)

    def cost(self, operands: Sequence[Operand]) -> BodyCost:
        """Of a call with these operands, whose memory is zero."""
        base = -(-ctypes.addressof(self._ub) // 4096) * 4096
        for cleared in (self._ub, self._counts):
            ctypes.memset(cleared, 0, ctypes.sizeof(cleared))
        self._run(*(
            _descriptor(base + o.address, o) if isinstance(o, Memref) else o for o in operands
        ))  # fmt: skip
        counts = dict(zip(self._names, self._counts, strict=True))
        assert counts["TRAP"] == 0, "the library's own assertion failed"
        return BodyCost(
            scalar=counts[""],
            waits=counts["WAIT.FLAG.IMM"],
            barriers=counts["BARRIER"],
            instructions=sum(n for name, n in counts.items() if _INSTRUCTION.match(name)),
        )


def _for_this_machine(library: Library, call: str) -> tuple[str, list[str]]:
    """LLVM text of a call's functions, counting, and what is counted; "" is scalar accesses."""
    declared = [match.groups() for match in _DECLARED.finditer(library.head)]
    names = ["", *(name for _, name, _ in declared)]
    stubs = []
    for number, (result, name, parameters) in enumerate(declared, start=1):
        value = "void" if result == "void" else f"{result} {'null' if result == 'ptr' else 0}"
        types = ", ".join(_TYPE.findall(parameters))
        stubs.append(
            f'define {result} @"hivm.{name}"({types}) {{\n{_count(number)}ret {value}\n}}'
        )
    bodies = [
        f"define {_ATTRIBUTES.sub('', library.functions[name])}\n}}"
        for name in library.closure(call)
    ]
    lines = [
        f"{_count(0, n) if _UB_ACCESS.search(line) else ''}{line}"
        for n, line in enumerate("\n".join(bodies).replace("@llvm.hivm.", "@hivm.").splitlines())
    ]
    # Scratch that a call does without is null; the device can read its (unused) descriptor there.
    text = re.sub(r"\bptr (noundef )?null", r"ptr \1@nothing", "\n".join(lines))
    types = [line for line in library.head.splitlines() if line.startswith("%")]
    counts = f"@counts = global [{len(names)} x i64] zeroinitializer"
    nothing = "@nothing = global [256 x i8] zeroinitializer"
    return "\n".join([*types, counts, nothing, *stubs, text]), names


def _count(number: int, suffix: int = 0) -> str:
    at = f"getelementptr (i64, ptr @counts, i64 {number})"
    return (
        f"%counted.{suffix} = load i64, ptr {at}\n"
        f"%more.{suffix} = add i64 %counted.{suffix}, 1\n"
        f"store i64 %more.{suffix}, ptr {at}\n"
    )


def _descriptor(address: int, operand: Memref) -> ctypes.Array[ctypes.c_int64]:
    """MLIR's: allocated and aligned address, offset, sizes, strides."""
    numbers = (address, address, 0, *operand.sizes, *operand.strides)
    return (ctypes.c_int64 * len(numbers))(*numbers)


@cache
def of_size(library: Library, call: str, size: int) -> BodyCost:
    """Of a call whose operands have so many elements, without gaps, on 32-byte boundaries."""
    body = _body(library, call)
    step = _UB_BYTES // (len(body.types) + 1) // 256 * 256
    dims = re.search(r"_(\d)d_", call)
    ones = (1,) * (int(dims[1]) - 1 if dims else 0)

    def memref(number: int) -> Memref:
        # A reduction's result is one element.
        count = 1 if call.startswith("reduce") and number == 1 else size
        return Memref(number * step, (*ones, count), (*(count * one for one in ones), 1))

    return body.cost([
        memref(n) if kind == "ptr" else 1.0 if kind == "float" else 1
        for n, kind in enumerate(body.types)
    ])  # fmt: skip


_body = cache(Body)


def is_scalar_loop(library: Library, call: str) -> bool:
    """Whether the scalar unit goes through a call's operands element by element."""
    return of_size(library, call, 512).scalar - of_size(library, call, 64).scalar >= 512 - 64
