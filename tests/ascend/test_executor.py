"""The executor notices what it is there to notice: corrupted code, bounds, races, stale UB."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from compile import CompiledKernel, Variant, compile_variant
from hivm import (
    FlagImbalance,
    HivmFault,
    OutOfBounds,
    Race,
    UninitialisedRead,
    UnsupportedOperation,
    execute,
    parse,
)
from sample_cases import CASES

_REMOVABLE = re.compile(r"\s*((func\.)?call @|hivm\.hir\.(set|wait)_flag|memref\.store)")


@cache
def compiled(name: str) -> CompiledKernel:
    return compile_variant(CASES[name].variant)


def outcome(text: str, name: str, seeds: int = 3) -> str | None:
    """How a corrupted kernel shows: the fault's class, "mismatch", or None if it does not."""
    module = parse(text)
    for seed in range(seeds):
        grid, arguments, expected = CASES[name].make(np.random.default_rng(seed))
        try:
            outputs = execute(module, grid, arguments, seed=seed).outputs
        except HivmFault as fault:
            return type(fault).__name__
        if any(not np.array_equal(outputs[index], array) for index, array in expected.items()):
            return "mismatch"
    return None


def removable_lines(name: str) -> list[int]:
    lines = compiled(name).hivm.splitlines()
    start = next(number for number, line in enumerate(lines) if "hacc.entry" in line)
    return [n for n, line in enumerate(lines) if n > start and _REMOVABLE.match(line)]


@pytest.mark.parametrize("name", ["decode_tile", "request_window", "select_and_clamp"])
def test_every_library_call_flag_and_store_is_missed_when_removed(name: str) -> None:
    lines = compiled(name).hivm.splitlines()
    removable = removable_lines(name)
    assert len(removable) >= 20
    unnoticed = [
        lines[number].strip()
        for number in removable
        if outcome("\n".join(lines[:number] + lines[number + 1 :]), name) is None
    ]
    assert unnoticed == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("shift_and_mask", "@vshrs_vs_1d_int32_t(", "@vshls_vs_1d_int32_t("),
        ("shift_and_mask", "@vadd_1d_int32_t(", "@vsub_1d_int32_t("),
        ("shift_and_mask", "@vand_1d_int32_t(", "@vor_1d_int32_t("),
        ("select_and_clamp", "arith.constant -1 : i32", "arith.constant -2 : i32"),
        ("select_and_clamp", "@vcmp_eq_1d_int32_t(", "@vcmp_ne_1d_int32_t("),
        ("select_and_clamp", "@vmins_vs_1d_int32_t(", "@vmaxs_vs_1d_int32_t("),
        ("floor_divide", "%c4_i32)", "%c0_i32)"),  # truncation becomes rounding
        ("reductions", "@reduce_min_r_int32_t(", "@reduce_max_r_int32_t("),
        ("count_faults", "%c1_i32) :", "%c0_i32) :"),  # the atomic add becomes a store
        ("widen", "(s1 + 1024, s0)", "(s1 + 1023, s0)"),  # a tile's bound off by one
        ("copy_2d", "arith.muli", "arith.addi"),
        ("branches", "arith.cmpi eq", "arith.cmpi ne"),
    ],
)
def test_one_wrong_operation_shows(name: str, old: str, new: str) -> None:
    head, entry = compiled(name).hivm.split("hacc.entry", 1)
    if old not in entry:
        head, changed = head.replace(old, new), entry
    else:
        changed = entry.replace(old, new)
    text = f"{head}hacc.entry{changed}"
    assert text != compiled(name).hivm
    text = re.sub(r"func\.func private .*\n", "", text)
    assert outcome(text, name) is not None


def run(name: str, grid: tuple[int, ...], *arguments: int | np.ndarray) -> list[np.ndarray]:
    return execute(compiled(name).module, grid, list(arguments)).outputs


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_store_behind_the_buffer_is_out_of_bounds() -> None:
    x = np.zeros(300, np.int32)
    with pytest.raises(OutOfBounds, match=r"argument 1: bytes \[0, 1200\) outside its 1196"):
        run("shift_and_mask", (1,), x, np.zeros(299, np.int32), 300, 1, 1)


def test_a_load_behind_the_buffer_is_out_of_bounds() -> None:
    out = np.zeros(300, np.int32)
    with pytest.raises(OutOfBounds, match=r"argument 0.*line \d+: .*load_gm_to_ubuf"):
        run("shift_and_mask", (1,), np.zeros(299, np.int32), out, 300, 1, 1)


def test_a_scalar_load_before_the_buffer_is_out_of_bounds() -> None:
    with pytest.raises(OutOfBounds, match=r"argument 1: bytes \[-4, 0\)"):
        run("discrete_load", (1,), ints(0), ints(7), ints(0), 1, -1)


def test_two_programs_writing_one_element_race() -> None:
    index, x = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    run("discrete_store", (2,), index, x, x, 128)
    index[100] = 5
    with pytest.raises(Race, match=r"program \d wrote byte 20 of argument 2, which program \d"):
        run("discrete_store", (2,), index, x, x, 128)


@pytest.mark.parametrize("seed", range(6))  # whichever of the two runs first
def test_a_program_reading_what_another_writes_races(seed: int) -> None:
    text = compiled("discrete_load").hivm
    assert text.count("%arg5 to offset") == 1
    in_place = parse(text.replace("%arg5 to offset", "%arg4 to offset"))  # out is the table
    index, table = np.arange(128, dtype=np.int32), np.arange(128, dtype=np.int32)
    execute(in_place, (2,), [index, table, table, 128, 127], seed=seed)
    with pytest.raises(Race, match="of argument 1, which"):
        execute(in_place, (2,), [index[::-1], table, table, 128, 127], seed=seed)


def test_atomics_commute_with_atomics_only() -> None:
    kernel = compiled("count_faults")
    faulty = np.full(4096, 9, np.int32)
    added = execute(kernel.module, (4,), [faulty, ints(0), 4096, 5]).outputs[1]
    assert added.tolist() == [4096]
    assert kernel.hivm.count("%c1_i32) :") == 1
    plain = parse(kernel.hivm.replace("%c1_i32) :", "%c0_i32) :"))
    with pytest.raises(Race, match="wrote byte 0 of argument 1"):
        execute(plain, (4,), [faulty, ints(0), 4096, 5])


def test_reading_ub_that_nobody_wrote_is_seen() -> None:
    lines = compiled("shift_and_mask").hivm.splitlines()
    load = next(n for n, line in enumerate(lines) if "call @load_gm_to_ubuf_1d" in line)
    module = parse("\n".join(lines[:load] + lines[load + 1 :]))
    x = np.zeros(1024, np.int32)
    with pytest.raises(UninitialisedRead, match=r"UB\[\d+:\d+\] read before it was written"):
        execute(module, (1,), [x, x.copy(), 1024, 1, 1])


def test_ub_does_not_survive_from_one_program_to_the_next() -> None:
    lines = compiled("shift_and_mask").hivm.splitlines()
    load = next(n for n, line in enumerate(lines) if "call @load_gm_to_ubuf_1d" in line)
    block = next(n for n, line in enumerate(lines) if "get_block_idx" in line)
    number = lines[block].split("=")[0].strip()
    lines[load : load + 1] = [
        "%zero = arith.constant 0 : i64",
        f"%first = arith.cmpi eq, {number}, %zero : i64",
        "scf.if %first {",
        lines[load],
        "}",
    ]
    x = np.zeros(2048, np.int32)
    with pytest.raises(UninitialisedRead, match="program 1"):
        execute(parse("\n".join(lines)), (2,), [x, x.copy(), 2048, 1, 1])


@pytest.mark.parametrize("flag", ["set_flag", "wait_flag"])
def test_an_unpaired_flag_is_seen(flag: str) -> None:
    lines = compiled("shift_and_mask").hivm.splitlines()
    at = max(n for n, line in enumerate(lines) if f"hivm.hir.{flag}" in line)
    module = parse("\n".join(lines[:at] + lines[at + 1 :]))
    x = np.zeros(1024, np.int32)
    with pytest.raises(FlagImbalance):
        execute(module, (1,), [x, x.copy(), 1024, 1, 1])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("@vshrs_vs_1d_int32_t", "@vfancy_1d_int32_t", "vfancy_1d_int32_t"),
        ("arith.cmpi slt", "arith.mystery slt", "arith.mystery"),
    ],
)
def test_an_unknown_operation_is_refused_by_name(old: str, new: str, named: str) -> None:
    text = compiled("shift_and_mask").hivm
    assert old in text
    x = np.zeros(8, np.int32)
    with pytest.raises(UnsupportedOperation, match=named):
        execute(parse(text.replace(old, new)), (1,), [x, x, 8, 1, 1])


def test_results_and_faults_do_not_depend_on_program_order() -> None:
    for name in ("decode_tile", "count_faults"):
        grid, arguments, expected = CASES[name].make(np.random.default_rng(0))
        for seed in range(4):
            outputs = execute(compiled(name).module, grid, arguments, seed=seed).outputs
            for index, array in expected.items():
                np.testing.assert_array_equal(outputs[index], array)


def test_the_callers_arrays_are_not_changed() -> None:
    x, out = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    run("shift_and_mask", (1,), x, out, 8, 1, 1)
    assert (out == 0).all()


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes 5 arguments, 4 given"):
        run("shift_and_mask", (1,), ints(1), ints(1), 1, 1)


def test_counts_follow_the_work() -> None:
    kernel = compiled("discrete_load")
    x = np.zeros(128, np.int32)
    one = execute(kernel.module, (2,), [x, x, x.copy(), 128, 0]).counts
    assert [count.gm_scalar_loads for count in one] == [64, 64]
    assert all(count.dma_transfers == 2 and count.dma_bytes == 512 for count in one)


def test_variants_are_compiled_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_SLOTS_ASCEND_CACHE", str(tmp_path))
    variant = CASES["shift_and_mask"].variant
    first = compile_variant(variant)
    monkeypatch.setattr("compile.lower_to_linalg", lambda *_: pytest.fail("compiled again"))
    assert compile_variant(variant).hivm == first.hivm
    other = Variant(variant.name, variant.kernel, variant.signature, {"TILE": 512})
    with pytest.raises(pytest.fail.Exception):
        compile_variant(other)


def test_an_extended_product_keeps_both_halves() -> None:
    lines = compiled("shift_and_mask").hivm.splitlines()
    block = next(n for n, line in enumerate(lines) if "get_block_idx" in line)
    product = next(n for n, line in enumerate(lines) if "vmuls_vs_1d" in line and "call" in line)
    lines[product] = lines[product].replace("%c1000_i32", "%sum")
    lines[block + 1 : block + 1] = [
        "%low, %high = arith.mulsi_extended %arg7, %arg7 : i32",
        "%sum = arith.addi %low, %high : i32",
    ]
    x = np.full(1024, 2, np.int32)
    mask = 2**17 + 1  # squared: 4 * 2**32 + 2**18 + 1
    outputs = execute(parse("\n".join(lines)), (1,), [x, x, 1024, 1, mask]).outputs
    assert (outputs[1] == 4 + 2**18 + 1).all()
