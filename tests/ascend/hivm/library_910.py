"""The vector library of 910B: one NumPy expression a call, found by the call's name.

Names follow a grammar, `operation_shape_type`; a name outside it is refused. Argument orders are
those of the library's own C interface. Trailing scratch buffers are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import BLOCK, OutOfBounds, UnsupportedOperation, View
from .modes import round_to_int32
from .runtime import Runtime

Call = Callable[..., None]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum,
    "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shr": np.right_shift, "shl": np.left_shift,
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "min": np.min, "max": np.max}
_PATTERNS: list[tuple[re.Pattern[str], Callable[..., Call]]] = []


def find(name: str) -> Call:
    """The call of that name, or UnsupportedOperation."""
    for pattern, make in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return make(**match.groupdict())
    raise UnsupportedOperation(f"library call @{name}")


def _named(pattern: str) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    def register(make: Callable[..., Call]) -> Callable[..., Call]:
        _PATTERNS.append((re.compile(pattern), make))
        return make

    return register


@_named(r"sync_block_(?:un)?lock|free_lock_var")
def _lock() -> Call:
    raise UnsupportedOperation(
        "an in-order lock (an int64 atomic, or an atomic whose result is used): program i waits "
        "until program i - 1 has released it, so one that never takes it hangs the device"
    )


def _finish(rt: Runtime, target: View, values: Any, passes: int = 1) -> None:
    rt.counts.vector(target.nbytes, passes)
    with np.errstate(over="ignore"):
        target.memory.write(target, values)


def _operand(operand: Any, like: View) -> Any:
    """A vector operand's elements, or a scalar in the vector's type."""
    if isinstance(operand, View):
        return operand.memory.read(operand)
    return np.asarray(operand).astype(like.dtype)


@_named(r"load_gm_to_ubuf_\dd_\w+")
def _load() -> Call:
    def load(rt: Runtime, source: View, target: View, mode: int, padding: Any, left: int,
             *_: int) -> None:  # fmt: skip
        values = source.memory.read(source)
        if source.count == 0:
            return
        if source.sizes != target.sizes:
            raise OutOfBounds(f"a load of {source.sizes} elements into {target.sizes}")
        rt.counts.transfer(source.nbytes)
        target.memory.write(target, values)
        if left:  # the transfer begins at the block's start and pads up to the first element
            head = View(target.memory, target.dtype, target.base, target.offset - left,
                        (left,), (1,))  # fmt: skip
            target.memory.write(head, padding if mode == 2 else 0)
        if rt.modes.flush_tail:
            _flush_tail(target, padding if mode == 2 else 0)

    return load


def _flush_tail(target: View, padding: Any) -> None:
    """What the transfer does to the rest of the last 32-byte block of every row."""
    rows, width = target.count // target.sizes[-1], target.sizes[-1]
    beyond = -(width * target.itemsize) % BLOCK // target.itemsize
    if beyond == 0:
        return
    if len(target.sizes) > 2:
        raise UnsupportedOperation("a padded load of rank above two")
    step = target.strides[0] if len(target.sizes) == 2 else width
    tail = View(target.memory, target.dtype, target.base, target.offset + width,
                (rows, beyond), (step, 1))  # fmt: skip
    if rows > 1 and step < width + beyond:
        raise OutOfBounds(f"rows of {width} elements, {step} apart, flush into one another")
    last = min(tail.span()[1], len(target.memory.data))
    if tail.span()[1] == last:
        target.memory.write(tail, padding)


@_named(r"store_ubuf_to_gm_\dd_\w+")
def _store() -> Call:
    def store(rt: Runtime, source: View, target: View, atomic: int) -> None:
        if source.count == 0:
            return
        if source.sizes != target.sizes:
            raise OutOfBounds(f"a store of {source.sizes} elements to {target.sizes}")
        values = source.memory.read(source)
        if source.span()[0] % BLOCK:
            _store_by_scalar(rt, source, target, values, atomic)
            return
        rt.counts.transfer(source.nbytes)
        if atomic == 0:
            target.memory.write(target, values)
        elif atomic == 1:
            rt.counts.atomics += 1
            target.memory.add(target, values)
        else:
            raise UnsupportedOperation(f"a store with atomic kind {atomic}")

    return store


def _store_by_scalar(rt: Runtime, source: View, target: View, values: np.ndarray,
                     atomic: int) -> None:  # fmt: skip
    """A store from UB off a 32-byte boundary: the library copies one element at a time."""
    if atomic:
        raise UnsupportedOperation("an atomic store from an unaligned UB address: not atomic")
    rt.counts.scalar_ops += 2 * values.size
    rt.counts.gm_scalar_stores += values.size
    for index in np.ndindex(values.shape):
        target.memory.store(target, index, values[index])


@_named(r"broadcast_scalar_\w+_to_\dd")
def _broadcast() -> Call:
    return lambda rt, value, target: _finish(rt, target, value)


@_named(r"broadcast_first_axis_align_2d_\w+")
def _broadcast_rows() -> Call:
    return lambda rt, source, target, *_: _finish(rt, target, source.memory.read(source))


@_named(r"arange_1d_int32_t")
def _arange() -> Call:
    def arange(rt: Runtime, target: View, first: int, step: int) -> None:
        _finish(rt, target, first + step * np.arange(target.count))

    return arange


@_named(r"copy_ubuf_to_ubuf_\dd_\w+")
def _copy() -> Call:
    return lambda rt, source, target, *_: _finish(rt, target, source.memory.read(source))


@_named(r"vcast_(?P<source>\w+)_to_(?P<target>\w+)_1d_with_(?P<kind>mode|overflow|temp)")
def _cast(source: str, target: str, kind: str) -> Call:
    pair = (source.removesuffix("_t"), target.removesuffix("_t"))
    known = {("int64", "int32"), ("int32", "int64"), ("int32", "float"), ("float", "int32"),
             ("int64", "float"),
             ("bool", "int32"), ("bool", "float"), ("int8", "half")}  # fmt: skip
    if pair not in known:
        raise UnsupportedOperation(f"a cast from {source} to {target}")

    def cast(rt: Runtime, origin: View, result: View, *rest: Any) -> None:
        values = origin.memory.read(origin)
        if pair == ("float", "int32"):
            values = round_to_int32(values, rest[-1])
        elif pair == ("int64", "int32"):
            values = rt.modes.to_int32(values)
        _finish(rt, result, values)

    return cast


@_named(r"vdiv_(?:vs_|sv_)?\dd_float")
def _divide() -> Call:
    def divide(rt: Runtime, left: Any, right: Any, target: View, *_: View) -> None:
        quotient = rt.modes.divide(_operand(left, target), _operand(right, target))
        _finish(rt, target, quotient)

    return divide


@_named(r"v(?P<name>add|sub|mul|min|max|shr|shl)s_(?:vs|sv)_\dd_(?:int32_t|float)")
@_named(r"v(?P<name>add|sub|mul|min|max|and|or|xor)_\dd_(?:int32_t|float|bool)")
def _binary(name: str) -> Call:
    function = _BINARY[name]

    def binary(rt: Runtime, left: Any, right: Any, target: View, *_: View) -> None:
        with np.errstate(over="ignore"):
            values = function(_operand(left, target), _operand(right, target))
        _finish(rt, target, values)

    return binary


@_named(r"vnot_\dd_(?:bool|int32_t)")
def _not() -> Call:
    return lambda rt, source, target, *_: _finish(rt, target, ~source.memory.read(source))


@_named(r"vcmps?_(?P<name>eq|ne|lt|le|gt|ge)_\dd_(?:int32_t|float|half)")
def _compare(name: str) -> Call:
    function = _COMPARE[name]

    def compare(rt: Runtime, left: View, right: Any, target: View) -> None:
        rt.counts.vector(left.nbytes)
        target.memory.write(target, function(_operand(left, left), _operand(right, left)))

    return compare


@_named(r"vsel_(?:vv|vs|sv|ss)_\dd_(?:bool_)?(?:int32_t|int64_t|float)")
def _select() -> Call:
    def select(rt: Runtime, condition: View, yes: Any, no: Any, target: View, *_: View) -> None:
        chosen = condition.memory.read(condition).astype(bool)
        _finish(rt, target, np.where(chosen, _operand(yes, target), _operand(no, target)))

    return select


@_named(r"gather_1d_float")
def _gather() -> Call:
    def gather(rt: Runtime, source: View, indices: View, target: View, scratch: View) -> None:
        at = indices.memory.read(indices)
        if at.size and (at.min() < 0 or at.max() >= source.count):
            raise OutOfBounds(f"a gather of [{at.min()}, {at.max()}] from {source.count} elements")
        # bit patterns, so that no float quietly turns into another
        words = View(source.memory, np.dtype(np.int32), source.base, source.offset,
                     source.sizes, source.strides)  # fmt: skip
        result = View(target.memory, np.dtype(np.int32), target.base, target.offset,
                      target.sizes, target.strides)  # fmt: skip
        _finish(rt, result, words.memory.read(words)[at], passes=3)

    return gather


@_named(r"reduce_(?P<name>sum|min|max)_(?P<axes>ra?)_int32_t")
def _reduce(name: str, axes: str) -> Call:
    """`r`: all elements to one; `ra`: the rows of a tile to one row."""
    function = _REDUCE[name]

    def reduce(rt: Runtime, source: View, target: View, scratch: View, initial: int) -> None:
        values = source.memory.read(source)
        rt.counts.vector(source.nbytes)
        if axes == "r":
            values = values.reshape(-1, 1)
        start = np.full_like(values[:1], initial)
        with np.errstate(over="ignore"):
            result = function(np.concatenate([values, start]), axis=0).reshape(target.sizes)
        target.memory.write(target, np.asarray(result).astype(np.int32))

    return reduce
