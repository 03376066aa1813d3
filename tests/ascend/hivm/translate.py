"""HIVM operations -> Python source, one line an operation.

Structured loops become Python loops; a control-flow graph becomes one loop over block numbers.
Every line remembers the line of HIVM that it came from, so a fault can name it. An operation
without a rule here is refused by name, before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from . import calls_950, runtime
from .counts import Counts, static_counts
from .expressions import Expressions, name
from .parser import Block, Function, Module, Operation

_NOTHING = {"hivm.hir.set_mask_norm", "hivm.hir.set_ctrl"}
_ACCESSES = ("memref.load", "memref.store")


@dataclass
class Program:
    """A module as Python: `functions[entry](rt, *arguments)`, `visits` counts block executions."""

    functions: dict[str, Callable[..., None]]
    visits: list[int]
    costs: list[Counts]
    origin: dict[str, list[int]]  # generated file name -> HIVM line of every Python line


@dataclass
class Translator(Expressions):
    """Statements: functions, blocks, branches and loops round the expressions."""

    lines: list[tuple[int, str, int]] = field(default_factory=list)
    recorded: bool = False

    def emit(self, depth: int, text: str, line: int) -> None:
        self.lines.append((depth, text, line))

    def count_visit(self, depth: int, block: Block, line: int) -> None:
        self.emit(depth, f"visits[{len(self.costs)}] += 1", line)
        self.costs.append(static_counts([op.name for op in block.operations]))

    def function(self, function: Function) -> list[tuple[int, str, int]]:
        self.lines = []
        recorded = self.recorded
        self.recorded &= function.is_entry  # a vector function is one instruction of its caller
        arguments = ", ".join(["rt", *map(name, function.arguments)])
        self.emit(0, f"def {function.name}({arguments}):", function.line)
        if len(function.blocks) == 1:
            self.block(function.blocks[0], 1, function.line)
        else:
            self.graph(function)
        self.recorded = recorded
        return self.lines

    def graph(self, function: Function) -> None:
        """Blocks that branch to each other: a loop over block numbers."""
        self.emit(1, "block = 0", function.line)
        self.emit(1, "while True:", function.line)
        for number, block in enumerate(function.blocks):
            self.emit(2, f"{'if' if number == 0 else 'elif'} block == {number}:", function.line)
            self.block(block, 3, function.line, function.blocks)

    def block(
        self, block: Block, depth: int, line: int, graph: list[Block] | None = None,
        targets: list[str] | None = None,
    ) -> None:  # fmt: skip
        """A straight line of operations; `targets` receive what its scf.yield gives."""
        self.count_visit(depth, block, line)
        for op in block.operations:
            if op.name == "scf.yield":
                if targets:
                    values = ", ".join(map(name, op.operands))
                    self.emit(depth, f"{', '.join(targets)} = {values}", op.line)
            elif op.name in ("return", "func.return"):
                self.emit(depth, "return" + "".join(f" {name(v)}" for v in op.operands), op.line)
            elif op.name in ("cf.br", "cf.cond_br"):
                assert graph is not None
                self.branch(op, depth, graph)
            else:
                self.operation(op, depth)

    def branch(self, op: Operation, depth: int, graph: list[Block]) -> None:
        targets = re.findall(r"\^(\w+)(?:\(([^:)]*)[^)]*\))?", op.text)
        if op.name == "cf.cond_br":
            self.emit(depth, f"if {name(op.operands[0])}:", op.line)
            self.jump(targets[0], depth + 1, graph, op.line)
            self.emit(depth, "else:", op.line)
            self.jump(targets[1], depth + 1, graph, op.line)
        else:
            self.jump(targets[0], depth, graph, op.line)

    def jump(self, target: tuple[str, str], depth: int, graph: list[Block], line: int) -> None:
        label, operands = target
        number = [block.label for block in graph].index(label)
        if operands.strip():
            left = ", ".join(map(name, graph[number].arguments))
            right = ", ".join(name(o.strip()) for o in operands.split(","))
            self.emit(depth, f"{left} = {right}", line)
        self.emit(depth, f"block = {number}", line)

    def operation(self, op: Operation, depth: int) -> None:
        if op.name in ("scf.for", "scf.if", "scf.while"):
            getattr(self, op.name.replace(".", "_"))(op, depth)
        elif op.name == "hivm.hir.pipe_barrier":
            if self.recorded:
                pipe = op.text.strip("[]<>").removeprefix("PIPE_")
                self.emit(depth, f"rt.recorder.act('barrier', {pipe!r}, {op.line})", op.line)
        elif op.name not in _NOTHING:
            if self.recorded:
                self.record(op, depth)
            text = self.expression(op)
            left = ", ".join(map(name, op.results))
            self.emit(depth, f"{left} = {text}" if left else text, op.line)

    def record(self, op: Operation, depth: int) -> None:
        """An instruction for the trace, before it runs."""
        pipe = _pipe_of(op, self.module)
        if pipe:
            named = op.callee if op.name.endswith("call") else op.name
            self.emit(depth, f"rt.recorder.issue({pipe!r}, {op.line}, {named!r})", op.line)
        elif static_counts([op.name]).scalar_ops:
            self.emit(depth, "rt.recorder.act('scalar', 1)", op.line)

    def scf_for(self, op: Operation, depth: int) -> None:
        match = re.match(r"(%[\w-]+) = (\S+) to (\S+) step (\S+)", op.text)
        assert match, op.text
        variable, low, high, step = map(name, match.groups())
        pairs = self.iteration_arguments(op, depth)
        self.emit(depth, f"for {variable} in range({low}, {high}, {step}):", op.line)
        self.block(op.regions[0][0], depth + 1, op.line, targets=[a for a, _ in pairs])
        for result, (carried, _) in zip(map(name, op.results), pairs, strict=True):
            self.emit(depth, f"{result} = {carried}", op.line)

    def iteration_arguments(self, op: Operation, depth: int) -> list[tuple[str, str]]:
        match = re.search(r"(?:iter_args|^)\((%.*?)\) (?:->|:)", op.text)
        if match is None:
            return []
        pairs = [tuple(map(name, pair.split(" = "))) for pair in match.group(1).split(", ")]
        left, right = ", ".join(a for a, _ in pairs), ", ".join(b for _, b in pairs)
        self.emit(depth, f"{left} = {right}", op.line)
        return [(a, b) for a, b in pairs]

    def scf_if(self, op: Operation, depth: int) -> None:
        results = [name(result) for result in op.results]
        self.emit(depth, f"if {name(op.operands[0])}:", op.line)
        self.block(op.regions[0][0], depth + 1, op.line, targets=results)
        if len(op.regions) > 1:
            self.emit(depth, "else:", op.line)
            self.block(op.regions[1][0], depth + 1, op.line, targets=results)

    def scf_while(self, op: Operation, depth: int) -> None:
        carried = [a for a, _ in self.iteration_arguments(op, depth)]
        before, after = op.regions[0][0], op.regions[1][0]
        condition = before.operations[-1]
        self.emit(depth, "while True:", op.line)
        self.block(Block("", [], before.operations[:-1]), depth + 1, op.line)
        test, *values = map(name, condition.operands)
        self.emit(depth + 1, f"if not {test}:", condition.line)
        left = ", ".join(map(name, op.results))
        self.emit(depth + 2, f"{left} = {', '.join(values)}" if left else "pass", condition.line)
        self.emit(depth + 2, "break", condition.line)
        if after.arguments:
            left = ", ".join(map(name, after.arguments))
            self.emit(depth + 1, f"{left} = {', '.join(values)}", condition.line)
        self.block(after, depth + 1, op.line, targets=carried)


def _pipe_of(op: Operation, module: Module) -> str:
    """The pipe that runs an operation; nothing for work on registers."""
    if op.name in _ACCESSES:
        return "S"
    if not op.name.endswith("call"):
        return ""
    if op.callee in module.functions:
        inner = "hivm.vector_function" in module.functions[op.callee].attributes
        return "V" if inner else ""
    return {"load_gm_to_ubuf": "MTE2", "store_ubuf_to_g": "MTE3"}.get(op.callee[:15], "V")


def translate(module: Module, *, recorded: bool = False) -> Program:
    """Compiles every device function of the module; `recorded` code fills `rt.recorder` as it runs.

    Raises UnsupportedOperation.
    """
    translator = Translator(module, recorded=recorded)
    visits: list[int] = []
    translator.names = {
        "visits": visits, "wrap": runtime.wrap, "divide": runtime.divide,
        "remainder": runtime.remainder, "reinterpret": runtime.reinterpret,
        "subview": runtime.subview, "reshape": runtime.reshape, "expand": runtime.expand,
        "bitcast": runtime.bitcast,
        "float32": runtime.np.float32, **calls_950.NAMES,
    }  # fmt: skip
    origin: dict[str, list[int]] = {}
    for function in sorted(module.functions.values(), key=lambda f: not f.is_entry):
        if "hacc.function_kind<HOST>" in function.attributes:
            continue
        lines = translator.function(function)
        filename = f"<hivm {function.name}>"
        origin[filename] = [line for _, _, line in lines]
        source = "\n".join("    " * depth + text for depth, text, _ in lines)
        exec(compile(source, filename, "exec"), translator.names)
    visits.extend([0] * len(translator.costs))
    functions = {f: translator.names[f] for f in module.functions if f in translator.names}
    return Program(functions, visits, translator.costs, origin)
