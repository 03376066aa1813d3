"""Small kernels, each of which shows one thing about the hardware."""

import triton
import triton.language as tl


@triton.jit
def write_words(out_ptr, turns, WORDS: tl.constexpr):
    """Program p stores its number to words [p * WORDS, (p + 1) * WORDS), over and over."""
    program = tl.program_id(0)
    lanes = tl.arange(0, 16)
    for _ in range(turns):
        tl.store(out_ptr + program * WORDS + lanes, program + lanes * 0, mask=lanes < WORDS)


@triton.jit
def write_beside_a_reader(lines_ptr, sums_ptr, turns):
    """Of each two programs one stores to words 8 to 15 of a 64-byte line and the other one loads
    words 0 to 7, which nobody writes, by scalars."""
    program = tl.program_id(0)
    line = program // 2
    lanes = tl.arange(0, 8)
    if program % 2 == 0:
        for turn in range(turns):
            tl.store(lines_ptr + line * 16 + 8 + lanes, turn + lanes * 0)
    else:
        total = 0
        for turn in range(turns):
            total += tl.load(lines_ptr + line * 16 + turn % 8)
        tl.store(sums_ptr + line, total)


@triton.jit
def publish(value_ptr, value):
    """A transfer of one value to eight words."""
    lanes = tl.arange(0, 8)
    tl.store(value_ptr + lanes, value + lanes * 0)


@triton.jit
def observe(value_ptr, out_ptr):
    """Every program loads the value by a scalar load."""
    value = tl.load(value_ptr)
    lanes = tl.arange(0, 8)
    tl.store(out_ptr + tl.program_id(0) * 8 + lanes, value + lanes * 0)


@triton.jit
def select_and_reduce(x_ptr, out_ptr, tiles, TILE: tl.constexpr):
    """Selects, ranges and reductions, whose bodies use events, and scalars that decide stores."""
    program = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    least = 0
    for tile in range(tiles):
        x = tl.load(x_ptr + (program * tiles + tile) * TILE + lanes)
        kept = tl.where(x > least, x, least)
        total = tl.sum(tl.where(kept > lanes, kept, lanes), axis=0)
        least = total % 97
        tl.store(out_ptr + (program * tiles + tile) * TILE + lanes, kept + least)


@triton.jit
def narrow_and_divide(wide_ptr, divisor, narrow_ptr, quotient_ptr, TILE: tl.constexpr):
    """int64 to int32, and an int32 division, which is done in float32."""
    lanes = tl.arange(0, TILE)
    narrow = tl.load(wide_ptr + lanes).to(tl.int32)
    tl.store(narrow_ptr + lanes, narrow)
    tl.store(quotient_ptr + lanes, tl.load(narrow_ptr + TILE + lanes) // divisor)


@triton.jit
def chase(next_ptr, out_ptr, steps, first, second):
    """Loads that depend on one another: `steps` of them in programs `first` and `second`."""
    program = tl.program_id(0)
    at = 0
    if (program == first) | (program == second):
        for _ in range(steps):
            at = tl.load(next_ptr + at)
    lanes = tl.arange(0, 8)
    tl.store(out_ptr + program * 8 + lanes, at + lanes * 0)


@triton.jit
def copy_tile(x_ptr, out_ptr, turns, TILE: tl.constexpr):
    """A load and a store of a tile, `turns` times, each after the other."""
    lanes = tl.arange(0, TILE)
    for turn in range(turns):
        x = tl.load(x_ptr + lanes)
        tl.store(out_ptr + lanes, x + turn)


@triton.jit
def do_nothing(out_ptr):
    """A store that never happens."""
    if tl.program_id(0) < 0:
        tl.store(out_ptr, 0)
