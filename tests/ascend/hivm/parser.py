"""HIVM text -> functions, blocks and operations.

Only the shape of the text is parsed here: which operation stands where, what it defines, which
regions it holds. What an operation means is left to `translate` (to run it) and `cost` (to count
it); both read the operation's own text. Two dialects arrive in one grammar: structured scf loops
(910B) and a flat control-flow graph with vector functions of their own (950).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPERATION = re.compile(r'(?:(%[\w, %:#-]+?) = )?"?([A-Za-z_][\w.]*)"?(.*)$')
_BLOCK_LABEL = re.compile(r"\^(\w+)(?:\((.*)\))?:")
_ARGUMENT = re.compile(r"(%[\w-]+): ")
_AFFINE_MAP = re.compile(r"#(\w+) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$")


@dataclass
class Operation:
    """One operation: `results = name text`, with the regions that it holds."""

    name: str
    text: str
    results: list[str]
    line: int
    regions: list[list[Block]] = field(default_factory=list)
    trailing: str = ""

    @property
    def operands(self) -> list[str]:
        """SSA names in the order in which they stand in the text, types stripped."""
        return re.findall(r"%[\w-]+(?:#\d+)?", self.text)

    @property
    def callee(self) -> str:
        match = re.search(r"@(\w+)", self.text)
        return match.group(1) if match else ""


@dataclass
class Block:
    label: str = ""
    arguments: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Function:
    name: str
    arguments: list[str]
    attributes: str
    blocks: list[Block]
    line: int

    @property
    def is_entry(self) -> bool:
        return "hacc.entry" in self.attributes

    def walk(self) -> Iterator[Operation]:
        yield from walk(self.blocks)


@dataclass
class Module:
    """A parsed file: its functions with a body, its affine maps and its lines for messages."""

    functions: dict[str, Function]
    maps: dict[str, tuple[list[str], list[str]]]
    lines: list[str]

    @property
    def entry(self) -> Function:
        entries = [function for function in self.functions.values() if function.is_entry]
        if len(entries) != 1:
            raise ValueError(f"one entry function expected, found {[f.name for f in entries]}")
        return entries[0]

    @property
    def ub_capacity(self) -> int:
        """Bytes of unified buffer of a vector core, as the file's own target says (in bits)."""
        match = re.search(r'"UB_SIZE", (\d+)', "\n".join(self.lines[:40]))
        return int(match.group(1)) // 8 if match else 192 * 1024

    @property
    def vector_cores(self) -> int:
        """Vector cores of the file's own target."""
        match = re.search(r'"VECTOR_CORE_COUNT", (\d+)', "\n".join(self.lines[:40]))
        if match is None:
            raise ValueError("the file names no number of vector cores")
        return int(match.group(1))


def walk(blocks: list[Block]) -> Iterator[Operation]:
    """Every operation of the blocks, outer before inner."""
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from walk(region)


def parse(text: str) -> Module:
    """Parses a whole `module.hivm.opt.mlir`. Raises ValueError on a line that it cannot place."""
    lines = text.splitlines()
    module = Module({}, {}, lines)
    number = 0
    while number < len(lines):
        line = lines[number].strip()
        match = _AFFINE_MAP.match(line)
        if match:
            name, dims, symbols, results = match.groups()
            names = [n.strip() for n in f"{dims},{symbols or ''}".split(",") if n.strip()]
            module.maps[name] = (names, _split(results))
        elif line.startswith("func.func") and line.endswith("{"):
            number = _parse_function(lines, number, module)
        number += 1
    return module


def _parse_function(lines: list[str], number: int, module: Module) -> int:
    header = lines[number].strip()
    match = re.match(r"func\.func (?:private )?@(\w+)\((.*)$", header)
    if match is None:
        raise ValueError(f"line {number + 1}: not a function header: {header[:80]}")
    name, rest = match.groups()
    blocks, end, _ = _parse_region(lines, number + 1)
    arguments = _ARGUMENT.findall(rest)
    attributes = rest.split(" attributes ", 1)[-1] if " attributes " in rest else ""
    module.functions[name] = Function(name, arguments, attributes, blocks, number + 1)
    return end


def _parse_region(lines: list[str], number: int) -> tuple[list[Block], int, str]:
    """Blocks up to the line that closes the region; that line's number and what follows `}`."""
    blocks = [Block()]
    while number < len(lines):
        line = lines[number].strip()
        if line.startswith("}"):
            return blocks, number, line[1:].strip()
        label = _BLOCK_LABEL.match(line)
        if label:
            arguments = _ARGUMENT.findall(label.group(2) or "")
            if blocks == [Block()]:
                blocks = []
            blocks.append(Block(label.group(1), arguments))
        elif line:
            operation = _parse_operation(line, number)
            blocks[-1].operations.append(operation)
            if line.endswith("{"):
                number = _parse_regions_of(operation, lines, number)
        number += 1
    raise ValueError("the file ends inside a region")


def _parse_regions_of(operation: Operation, lines: list[str], number: int) -> int:
    while True:
        region, number, trailing = _parse_region(lines, number + 1)
        operation.regions.append(region)
        if not trailing.endswith("{"):
            operation.trailing = trailing
            return number


def _parse_operation(line: str, number: int) -> Operation:
    match = _OPERATION.match(line)
    if match is None:
        raise ValueError(f"line {number + 1}: not an operation: {line[:80]}")
    results, name, rest = match.groups()
    return Operation(name, rest.strip(), _result_names(results or ""), number + 1)


def _result_names(text: str) -> list[str]:
    """`%3:2` names two results, %3#0 and %3#1."""
    names: list[str] = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if count:
            names += [f"{name}#{i}" for i in range(int(count))]
        elif name:
            names.append(name)
    return names


def _split(text: str) -> list[str]:
    """Splits at commas outside parentheses."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()]
