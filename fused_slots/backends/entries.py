"""What a kernel entry takes, as its docstring declares it.

The lines of its "Args:" section name the arguments in order, each with a type: `index`, `slot` and
`table` (a variant decides how wide), `int32`, `int64`, with a shape behind it for a pointer, or
`constant`. Bound launches take their order and their types from here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from fused_slots.backends.launch import triton_type

_LINE = re.compile(r"^ {4}(\w+): (index|slot|table|int32|int64|constant)\b( \[)?", re.MULTILINE)
_WIDTHS = {"int32": torch.int32, "int64": torch.int64}


class Argument(NamedTuple):
    """One declared argument: its type's word, and whether it is a pointer to elements of it."""

    name: str
    word: str
    is_pointer: bool

    def triton_type(self, chosen: Mapping[str, torch.dtype]) -> str:
        """Triton's name of the type, such as "*i64"; `chosen` are the widths a variant decides."""
        pointer = triton_type(chosen[self.word] if self.word in chosen else _WIDTHS[self.word])
        return pointer if self.is_pointer else pointer[1:]


@cache
def arguments_of(kernel: Any) -> tuple[Argument, ...]:
    """The arguments that an entry declares, in the order in which it takes them.

    Args:
        kernel: a Triton function, compiled or interpreted.

    Raises:
        TypeError: its docstring does not declare just the arguments that it has.
    """
    # From the source, as Triton has it: `python -OO` leaves no docstrings.
    source = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    function = source.body[0]
    assert isinstance(function, ast.FunctionDef)
    section = (ast.get_docstring(function) or "").partition("Args:\n")[2]
    declared = tuple(
        Argument(name, word, bool(shape)) for name, word, shape in _LINE.findall(section)
    )
    names = [argument.name for argument in declared]
    if names != list(kernel.arg_names):
        raise TypeError(f"{function.name} declares {names}, and takes {kernel.arg_names}")
    return declared
