"""Hostile and re-entrant calls of the native half of staging, beside the half in Python.

    python tests/staging_fuzz.py --calls 20000 [--extension PATH]

`make test-sanitizers` builds the extension with address and undefined-behaviour sanitizers and
runs this with it. Every call's result, error and packet must be those of the Python half.
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

if TYPE_CHECKING:
    from fused_slots.host.rows import HostRows

EXTENSION = "fused_slots.host._staging"
NUM_ROWS = 5


def use_extension(path: str) -> None:
    """Make this file the native half, whatever is installed."""
    loader = ExtensionFileLoader(EXTENSION, path)
    spec = spec_from_loader(EXTENSION, loader)
    assert spec is not None
    module = sys.modules[EXTENSION] = module_from_spec(spec)
    loader.exec_module(module)


class Meddling(list[int]):
    """Ids that make another call while they are read."""

    def __init__(self, ids: list[int], call: Callable[[], object]) -> None:
        super().__init__(ids)
        self.call = call

    def __iter__(self) -> Iterator[int]:
        self.call()
        return super().__iter__()


class Index(int):
    """An int of another type."""


class Fuzz:
    """One pair of halves and the calls that both of them get."""

    def __init__(self, rng: Random) -> None:
        from tests.test_host_halves import make_rows

        self.rng = rng
        self.halves: dict[str, HostRows] = {
            half: make_rows(half, max_num_reqs=NUM_ROWS) for half in ("native", "python")
        }
        self.counted: Counter[str] = Counter()

    def call(self) -> None:
        """One call on both halves; raises AssertionError when they differ."""
        from tests.test_host_halves import state

        make = self._call()
        outcomes = {name: self._outcome(make, half) for name, half in self.halves.items()}
        assert outcomes["native"] == outcomes["python"], outcomes
        if self.rng.random() < 0.2:
            states = [state(half) for half in self.halves.values()]
            assert states[0] == states[1]

    def _outcome(self, make: Callable[[HostRows], Any], half: HostRows) -> Any:
        try:
            return make(half)
        except (ValueError, RuntimeError, TypeError, OverflowError) as error:
            self.counted[type(error).__name__] += 1
            return type(error).__name__

    def _call(self) -> Callable[[HostRows], Any]:
        rng = self.rng
        rare = ("clear_row", "pack", "clear", "forget")
        kind = rng.choice(("stage",) * 6 + ("write",) * 3 + rare)
        self.counted[kind] += 1
        row, inner = self._row(), self._plain_call()
        if kind == "clear_row":
            return lambda half: half.clear_row(row)
        if kind == "pack":
            excess, dtype = rng.choice((-1, 0, 0, 3)), rng.choice((np.int32, np.int32, np.int16))
            return lambda half: self._pack(half, excess, dtype)
        if kind == "clear":
            return lambda half: half.clear()
        if kind == "forget":
            return lambda half: half.forget_device()
        lists, firsts, overwrite = self._lists(), self._firsts(), self._overwrite()

        def call(half: HostRows) -> Any:
            def again() -> object:
                return inner(half)

            given = [self._meddling(ids, again) for ids in lists] if lists is not None else lists
            if kind == "stage":
                return half.stage(row, given, overwrite)  # type: ignore[arg-type]
            return half.write(row, firsts, given)  # type: ignore[arg-type]

        return call

    def _plain_call(self) -> Callable[[HostRows], object]:
        """What a meddling argument does: it may take room, void what is staged, or pack."""
        rng, row = self.rng, self.rng.randrange(NUM_ROWS)
        ids: list[list[int]] = [[rng.randrange(9)] * rng.randrange(3), [], [rng.randrange(9)]]
        calls: list[Callable[[HostRows], object]] = [
            lambda half: half.stage(row, ids, True),
            lambda half: half.stage(row, [[1], [], []], False),
            lambda half: half.clear(),
            lambda half: half.clear_row(row),
            lambda half: half.pack(np.empty(half.packet_size, np.int32)),
        ]
        chosen = rng.choice(calls)

        def guarded(half: HostRows) -> object:
            try:
                return chosen(half)
            except ValueError:
                return None

        return guarded

    def _pack(self, half: HostRows, excess: int, dtype: Any) -> Any:
        packet = np.full(max(half.packet_size + excess, 0), -9, dtype)
        if dtype is not np.int32:
            packet = packet[: len(packet) // 4]  # too small, counted in bytes
            try:
                half.staging.pack(packet)
            except (ValueError, IndexError, TypeError):
                return None
            return None
        return half.pack(packet), packet.tolist()

    def _row(self) -> Any:
        odd = (-1, NUM_ROWS, 2**70, True, None, 1.0, "0", np.int64(2), Index(1), np.uint8(3))
        return self.rng.choice(odd) if self.rng.random() < 0.1 else self.rng.randrange(NUM_ROWS)

    def _ids(self) -> Any:
        rng = self.rng
        ids: Any = [rng.randrange(20) for _ in range(rng.choice((0, 0, 1, 2, 5)))]
        draw = rng.random()
        if draw < 0.05:
            odd = (-1, 2**31, 2**63, 2**64, True, None, 1.5, "a", Index(3), np.int16(4))
            ids.append(rng.choice(odd))
        elif draw < 0.1:
            return rng.choice((None, 7, "12", b"1", {1: 2}, np.array(3), object()))
        elif draw < 0.15:
            return rng.choice((tuple(ids), array("q", ids), np.array(ids, np.uint8), range(3)))
        elif draw < 0.2:
            ids *= 7
        return ids

    def _lists(self) -> Any:
        lists = [self._ids() for _ in range(3)]
        return self.rng.choice((None, lists[:2])) if self.rng.random() < 0.03 else lists

    def _firsts(self) -> Any:
        firsts = [self.rng.choice((0, 0, 1, 2, 3)) for _ in range(3)]
        if self.rng.random() < 0.1:
            return self.rng.choice((None, 3, firsts[:2], [0, None, 0], [True, 0, 0], [2**70] * 3))
        return firsts

    def _overwrite(self) -> Any:
        odd = self.rng.random() < 0.05
        return self.rng.choice((np.True_, 1, None)) if odd else self.rng.random() < 0.5

    def _meddling(self, ids: Any, call: Callable[[], object]) -> Any:
        """Every seventh list or so meddles, the same ones for both halves."""
        if isinstance(ids, list) and len(ids) % 2 and sum(map(id_of, ids)) % 7 == 3:
            return Meddling(ids, call)
        return ids


def id_of(value: object) -> int:
    return value if type(value) is int else 0


def build_and_drop(rng: Random) -> None:
    """Objects that are refused, that are part of a cycle, and that garbage calls once more."""
    from fused_slots.host import rows
    from tests.test_host_halves import native_arguments

    changed = rng.choice(({}, {"cells": np.zeros(1, np.int32)}, {"limits": np.zeros((2, 4))}))
    try:
        native = rows.NativeStaging(*native_arguments(**changed))
    except ValueError:
        return

    class Plain:
        def __call__(self, *request: object) -> object:
            return request

        def __del__(self) -> None:
            native: Any = self.native  # type: ignore[attr-defined]
            native.clear()
            for call, arguments in (
                (native.stage, (0, [[1], [1]], True)),
                (native.write, (0, [0, 0], [[1], [1]])),
                (native.clear_row, (0,)),
            ):
                try:
                    call(*arguments)
                except (RuntimeError, ValueError):
                    continue

    plain = Plain()
    plain.native = rows.NativeStaging(*native_arguments(plain=plain))  # type: ignore[attr-defined]
    gone = weakref.ref(plain)
    del plain, native
    gc.collect()
    assert gone() is None


def fuzz(calls: int, seed: int) -> Counter[str]:
    """So many calls in lives of 500; returns what was called and refused."""
    counted: Counter[str] = Counter()
    for life in range(-(-calls // 500)):
        rng = Random(seed + life)
        pair = Fuzz(rng)
        for _ in range(min(500, calls - 500 * life)):
            pair.call()
        counted += pair.counted
        build_and_drop(rng)
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extension", help="the native half to call instead of the installed one")
    options = parser.parse_args()
    if options.extension:
        use_extension(options.extension)
    from fused_slots.host import rows

    assert rows.NATIVE, "no native half"
    file = sys.modules[EXTENSION].__file__
    counted = fuzz(options.calls, options.seed)
    print(f"{options.calls} calls of {file}, all as in Python: {dict(sorted(counted.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
