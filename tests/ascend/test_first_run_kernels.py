"""The small kernels of bench/ascend_first_run compile for every target and do what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compile import TARGETS, Variant, compile_variant
from hivm import execute

from bench.ascend_first_run import kernels


def filled(size: int, value: int = 0) -> np.ndarray:
    return np.full(size, value, np.int32)


def result(
    name: str, target: str, programs: int, arguments: list[Any], **constants: int
) -> list[Any]:
    """What a kernel leaves in its arguments."""
    kernel = getattr(kernels, name)
    names = [n for n in kernel.arg_names if n not in constants]
    types = [
        f"*i{a.itemsize * 8}" if isinstance(a, np.ndarray) else "i32" for a in arguments
    ]
    signature = dict(zip(names, types, strict=True))
    options = {"multibuffer": not target.startswith("Ascend950")}
    compiled = compile_variant(Variant(name, kernel, signature, constants, options), target)
    assert compiled.figures["scalar_loops"] == compiled.figures["library_events"] == 0
    return execute(compiled.module, (programs,), arguments).outputs


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_the_first_run_do_what_they_say(target: str) -> None:
    [out, _] = result("write_words", target, 8, [filled(24), 4], WORDS=3)
    np.testing.assert_array_equal(out, np.repeat(np.arange(8), 3))
    words = np.arange(64, dtype=np.int32)
    lines, sums, _ = result("write_beside_a_reader", target, 8, [words, filled(4), 16])
    np.testing.assert_array_equal(sums, words.reshape(4, 16)[:, :8].sum(1) * 2)
    assert (lines.reshape(4, 16)[:, 8:] == 15).all()
    assert (result("publish", target, 1, [filled(8), 5])[0] == 5).all()
    assert (result("observe", target, 4, [filled(8, 7), filled(32)])[1] == 7).all()
    ring = np.roll(np.arange(256, dtype=np.int32), -1)
    out = result("chase", target, 4, [ring, filled(32), 9, 0, 1])[1]
    np.testing.assert_array_equal(out[::8], [9, 9, 0, 0])
    out = result("copy_tile", target, 1, [filled(256, 3), filled(256), 5], TILE=256)[1]
    assert (out == 3 + 4).all()
    assert not result("do_nothing", target, 4, [filled(8)])[0].any()


@pytest.mark.parametrize("target", TARGETS)
def test_selects_and_divisions_of_the_first_run(target: str) -> None:
    x = np.random.default_rng(0).integers(0, 999, (2, 4, 128)).astype(np.int32)
    expected, least = np.empty_like(x), np.zeros((2, 1), np.int64)
    for tile in range(4):
        kept = np.maximum(x[:, tile], least)
        least = np.maximum(kept, np.arange(128)).sum(1, keepdims=True) % 97
        expected[:, tile] = kept + least
    out = result("select_and_reduce", target, 2, [x.reshape(-1), filled(1024), 4], TILE=128)[1]
    np.testing.assert_array_equal(out, expected.reshape(-1))
    numbers = np.arange(256, dtype=np.int32)
    arguments = [np.arange(128) - 5, 7, numbers, filled(128)]
    *_, narrow, quotients = result("narrow_and_divide", target, 1, arguments, TILE=128)
    np.testing.assert_array_equal(narrow[:128], np.arange(128) - 5)
    np.testing.assert_array_equal(quotients, numbers[128:] // 7)
