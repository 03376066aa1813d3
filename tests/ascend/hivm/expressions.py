"""What each HIVM operation means, as a Python expression. Control flow is left to `translate`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from . import calls_950, library_910, vectors_950
from .counts import Counts
from .memory import UnsupportedOperation
from .parser import Module, Operation

_TOKEN = re.compile(r"%[\w-]+(?:#\d+)?|-?\d+")
_BINARY = {
    "addi": "{0} + {1}", "subi": "{0} - {1}", "muli": "{0} * {1}", "add": "{0} + {1}",
    "sub": "{0} - {1}", "mul": "{0} * {1}", "andi": "{0} & {1}", "and": "{0} & {1}",
    "ori": "{0} | {1}", "or": "{0} | {1}", "xori": "{0} ^ {1}", "xor": "{0} ^ {1}",
    "divsi": "divide({0}, {1})", "sdiv": "divide({0}, {1})",
    "remsi": "remainder({0}, {1})", "srem": "remainder({0}, {1})",
    "divui": "({0} & {m}) // ({1} & {m})", "udiv": "({0} & {m}) // ({1} & {m})",
    "remui": "({0} & {m}) % ({1} & {m})", "urem": "({0} & {m}) % ({1} & {m})",
    "shrsi": "{0} >> {1}", "ashr": "{0} >> {1}", "shli": "{0} << {1}", "shl": "{0} << {1}",
    "shrui": "({0} & {m}) >> {1}", "lshr": "({0} & {m}) >> {1}",
    "maxsi": "max({0}, {1})", "minsi": "min({0}, {1})",
    "intr.smax": "max({0}, {1})", "intr.smin": "min({0}, {1})",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def name(operand: str) -> str:
    """An SSA name or an integer literal as Python."""
    if not operand.startswith("%"):
        return operand
    return "v" + operand[1:].replace("-", "m").replace("#", "_r")


def bits(text: str) -> int:
    """Width of the last integer type named in the text; index counts as 64."""
    types = re.findall(r"\b(?:i(\d+)|index)\b", text.split(" : ")[-1])
    if not types:
        raise UnsupportedOperation(f"no integer type in {text!r}")
    return int(types[-1] or 64)


def memref_type(text: str) -> tuple[tuple[str, ...], str]:
    """The dimensions and element type of the last memref in the text."""
    inner = re.findall(r"memref<([^,>]*)", text)[-1]
    *dims, dtype = inner.split("x")
    return tuple(dims), dtype


def tuple_of(items: list[str]) -> str:
    return "(" + "".join(f"{name(item)}, " for item in items) + ")"


@dataclass
class Expressions:
    """Rules by operation name. `names` collects what the generated source refers to."""

    module: Module
    costs: list[Counts] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    def expression(self, op: Operation) -> str:
        """One operation as a Python expression."""
        dialect, _, kind = op.name.partition(".")
        if kind in _BINARY and dialect in ("arith", "llvm"):
            a, b = map(name, op.operands)
            width = bits(op.text)
            text = _BINARY[kind].format(a, b, m=(1 << width) - 1)
            return text if width == 64 else f"wrap({text}, {width})"
        rule = getattr(self, "on_" + op.name.replace(".", "_"), None)
        if rule is not None:
            return str(rule(op))
        if op.name.startswith("hivm_regbaseintrins."):
            operands = ", ".join(map(name, re.findall(r"%[\w-]+", op.text.split(") : ")[0])))
            result = op.text.rsplit("-> ", 1)[-1]
            function = vectors_950.find(op.name, result)
            return f"{self.bind(op.name + function.__name__ + result[-6:], function)}({operands})"
        raise UnsupportedOperation(f"{op.name} at line {op.line}: {op.text[:120]}")

    def bind(self, key: str, value: Any) -> str:
        identifier = "f_" + re.sub(r"\W", "_", key)
        self.names[identifier] = value
        return identifier

    def on_call(self, op: Operation) -> str:
        arguments = ", ".join(["rt", *map(name, op.operands)])
        if op.callee in self.module.functions:
            inner = f"{op.callee}({arguments})"
            if "hivm.vector_function" in self.module.functions[op.callee].attributes:
                self.costs[-1].vector_calls += 1
            return inner
        find = calls_950.find if calls_950.is_call(op.callee) else library_910.find
        return f"{self.bind(op.callee, find(op.callee))}({arguments})"

    on_func_call = on_call

    def on_arith_constant(self, op: Operation) -> str:
        value = re.sub(r" : .*| \{.*", "", op.text.strip("()")).strip("() ")
        if value in ("true", "false"):
            return str(int(value == "true"))
        if value.startswith("0x") or not re.fullmatch(r"-?[\d.]+(?:[eE][+-]?\d+)?", value):
            raise UnsupportedOperation(f"constant {op.text}")
        return value

    on_llvm_mlir_constant = on_arith_constant

    def on_arith_mulsi_extended(self, op: Operation) -> str:
        """Low and high half of a product."""
        a, b = map(name, op.operands)
        width = bits(op.text)
        return f"(wrap({a} * {b}, {width}), wrap({a} * {b} >> {width}, {width}))"

    def on_arith_cmpi(self, op: Operation) -> str:
        match = re.match(r'"?([su])?(eq|ne|lt|le|gt|ge)"?', op.text)
        assert match, op.text
        a, b = map(name, op.operands)
        if match.group(1) == "u":
            mask = (1 << bits(op.text)) - 1
            a, b = f"({a} & {mask})", f"({b} & {mask})"
        return f"int({a} {_COMPARE[match.group(2)]} {b})"

    on_llvm_icmp = on_arith_cmpi

    def on_arith_select(self, op: Operation) -> str:
        condition, yes, no = map(name, op.operands)
        return f"{yes} if {condition} else {no}"

    on_llvm_select = on_arith_select

    def on_arith_index_cast(self, op: Operation) -> str:
        return f"wrap({name(op.operands[0])}, {bits(op.text)})"

    on_arith_trunci = on_llvm_trunc = on_arith_index_cast

    def on_arith_extsi(self, op: Operation) -> str:
        sign = "-" if re.search(r": i1 to", op.text) else ""
        return f"{sign}{name(op.operands[0])}"

    on_llvm_sext = on_arith_extsi

    def on_arith_extui(self, op: Operation) -> str:
        match = re.search(r": i(\d+) to", op.text)
        assert match, op.text
        return f"{name(op.operands[0])} & {(1 << int(match.group(1))) - 1}"

    on_llvm_zext = on_arith_extui

    def on_arith_sitofp(self, op: Operation) -> str:
        return f"float(float32({name(op.operands[0])}))"

    on_llvm_sitofp = on_arith_sitofp

    def affine(self, op: Operation) -> list[str]:
        match = re.match(r"#(\w+)\(([^)]*)\)(?:\[([^\]]*)\])?", op.text)
        assert match, op.text
        parameters, results = self.module.maps[match.group(1)]
        operands = _TOKEN.findall(f"{match.group(2)}, {match.group(3) or ''}")
        values = dict(zip(parameters, map(name, operands), strict=True))
        python = [r.replace("floordiv", "//").replace("mod", "%") for r in results]
        return [re.sub(r"\b[ds]\d+\b", lambda m: values[m.group()], text) for text in python]

    def on_affine_apply(self, op: Operation) -> str:
        return self.affine(op)[0]

    def on_affine_min(self, op: Operation) -> str:
        return f"min({', '.join(self.affine(op))})"

    def on_affine_max(self, op: Operation) -> str:
        return f"max({', '.join(self.affine(op))})"

    def on_hivm_hir_get_block_idx(self, op: Operation) -> str:
        return "rt.block"

    def on_hivm_hir_set_flag(self, op: Operation) -> str:
        source, target, event = op.text.split(" : ")[0].strip("[]").split(", ")
        source, target = (p.strip("<>").removeprefix("PIPE_") for p in (source, target))
        number = event[len("<EVENT_ID") : -1] if event.startswith("<") else name(event)
        return f"rt.{op.name.rsplit('.', 1)[1]}({source!r}, {target!r}, {number}, {op.line})"

    on_hivm_hir_wait_flag = on_hivm_hir_set_flag

    def on_hivm_hir_pointer_cast(self, op: Operation) -> str:
        dims, dtype = memref_type(op.text)
        if "address_space<gm>" in op.text and dims == ("?",):
            return f"rt.gm_view({name(op.operands[0])}, {dtype!r})"
        if "address_space<ub>" not in op.text or "?" in dims:
            raise UnsupportedOperation(f"pointer_cast at line {op.line}: {op.text}")
        return f"rt.ub_view({name(op.operands[0])}, {dtype!r}, {tuple_of(list(dims))})"

    def on_memref_view(self, op: Operation) -> str:
        return "None"  # the address of a lock; taking it is refused

    def on_memref_alloca(self, op: Operation) -> str:
        dims, dtype = memref_type(op.text)
        return f"rt.stack_view({dtype!r}, {tuple_of(list(dims))})"

    def on_hivm_hir_bitcast(self, op: Operation) -> str:
        return f"bitcast({name(op.operands[0])}, {memref_type(op.text)[1]!r})"

    def on_memref_cast(self, op: Operation) -> str:
        return name(op.operands[0])

    on_builtin_unrealized_conversion_cast = on_memref_cast
    on_llvm_bitcast = calls_950.on_bitcast

    def on_memref_reinterpret_cast(self, op: Operation) -> str:
        match = re.search(r"offset: \[(.*?)\], sizes: \[(.*?)\], strides: \[(.*?)\]", op.text)
        assert match, op.text
        offset, sizes, strides = (_TOKEN.findall(group) for group in match.groups())
        return (f"reinterpret({name(op.operands[0])}, {name(offset[0])}, "
                f"{tuple_of(sizes)}, {tuple_of(strides)})")  # fmt: skip

    def on_memref_subview(self, op: Operation) -> str:
        lists = [_TOKEN.findall(g) for g in re.findall(r"\[([^\[\]]*)\]", op.text)[:3]]
        rank = len(memref_type(op.text)[0])
        text = f"{name(op.operands[0])}, {', '.join(tuple_of(part) for part in lists)}"
        return f"subview({text}, {len(lists[1]) - rank})"

    def on_memref_collapse_shape(self, op: Operation) -> str:
        match = re.search(r"(\[.*?\]) : ", op.text)
        assert match, op.text
        return f"reshape({name(op.operands[0])}, {match.group(1)})"

    def on_memref_expand_shape(self, op: Operation) -> str:
        match = re.search(r"output_shape \[([\d, ]+)\]", op.text)
        assert match, op.text
        return f"expand({name(op.operands[0])}, ({match.group(1)}))"

    def on_memref_extract_strided_metadata(self, op: Operation) -> str:
        view = name(op.operands[0])
        return (f"(reinterpret({view}, 0, (), ()), {view}.offset, "
                f"*{view}.sizes, *{view}.strides)")  # fmt: skip

    def on_memref_load(self, op: Operation) -> str:
        return f"rt.load({', '.join(map(name, op.operands))})"

    def on_memref_store(self, op: Operation) -> str:
        return f"rt.store({', '.join(map(name, op.operands))})"

    on_llvm_extractvalue = calls_950.on_extractvalue
    on_llvm_getelementptr = calls_950.on_getelementptr
    on_llvm_alloca = calls_950.on_alloca
