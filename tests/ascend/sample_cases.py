"""Every sample kernel with inputs and the NumPy result that its compiled code must reproduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import samples
from compile import Variant
from hivm import Pointers

Arguments = list[int | np.ndarray | Pointers]
_I32, _I64 = "*i32", "*i64"


@dataclass(frozen=True)
class Case:
    """`make(rng)` gives the grid, the arguments and the expected arrays by argument index."""

    variant: Variant
    make: Callable[[np.random.Generator], tuple[tuple[int, ...], Arguments, dict[int, np.ndarray]]]


CASES: dict[str, Case] = {}


def _case(pointers: str, scalars: str = "", wide: str = "", **constexprs: int) -> Callable:
    """Registers a case under the function's name, which is the sample kernel's."""

    def register(make: Callable) -> Callable:
        signature = {p: _I64 if p in wide.split() else _I32 for p in pointers.split()}
        signature |= dict.fromkeys(scalars.split(), "i32")
        kernel = getattr(samples, make.__name__)
        variant = Variant(make.__name__, kernel, signature, constexprs)
        CASES[make.__name__] = Case(variant, make)
        return make

    return register


def _empty(size: int, dtype: type = np.int32) -> np.ndarray:
    return np.full(size, -99, dtype)


def _tiles(n: int, tile: int) -> tuple[int]:
    return (-(-n // tile),)


@_case("x_ptr out_ptr", "n shift mask", TILE=1024)
def shift_and_mask(rng):
    n = int(rng.integers(1, 3000))
    x = rng.integers(-1000, 2**20, n, dtype=np.int32)
    return _tiles(n, 1024), [x, _empty(n), n, 5, 31], {1: (x >> 5) * 1000 + (x & 31)}


@_case("x_ptr out_ptr", "n divisor", TILE=1024)
def modulo(rng):
    x = rng.integers(0, 2**31 - 1, 1500, dtype=np.int32)
    return (2,), [x, _empty(1500), 1500, 48], {1: x % 48}


@_case("x_ptr out_ptr", "n divisor", TILE=1024)
def floor_divide(rng):
    x = rng.integers(0, 2**24, 1500, dtype=np.int32)
    return (2,), [x, _empty(1500), 1500, 48], {1: x // 48}


@_case("x_ptr out_ptr", "n divisor", TILE=1024)
def subtract_multiple(rng):
    x = rng.integers(0, 2**24, 1500, dtype=np.int32)
    return (2,), [x, _empty(1500), 1500, 640], {1: x % 640}


@_case("x_ptr quotient_ptr remainder_ptr", "n divisor", TILE=1024)
def corrected_divide(rng):
    d = int(rng.choice([64, 96, 640, 4096, 65536]))
    x = rng.integers(0, 2**31 - 1, 2048, dtype=np.int32)
    x[:6] = [0, d - 1, 2**24 - 1, 2**24 + 1, 2**31 - 1, (2**31 - 1) // d * d]
    return (2,), [x, _empty(2048), _empty(2048), 2048, d], {1: x // d, 2: x % d}


@_case("x_ptr y_ptr out_ptr", "n low high", TILE=1024)
def select_and_clamp(rng):
    n = int(rng.integers(1, 2000))
    x = rng.integers(-50, 50, n, dtype=np.int32)
    y = rng.integers(-50, 50, n, dtype=np.int32)
    expected = np.where(x < 0, -1, np.where(x == y, 30, np.clip(x, 10, 30)))
    return _tiles(n, 1024), [x, y, _empty(n), n, 10, 30], {2: expected}


@_case("x_ptr out_ptr starts_ptr", TILE=256)
def copy_range(rng):
    starts = np.sort(rng.integers(0, 2000, 9)).astype(np.int32)
    x = rng.integers(0, 1000, 2000, dtype=np.int32)
    expected = _empty(2000)
    expected[starts[0] : starts[-1]] = x[starts[0] : starts[-1]] + 1
    return (8,), [x, _empty(2000), starts], {1: expected}


@_case("index_ptr table_ptr out_ptr", "n last", TILE=64)
def discrete_load(rng):
    index = rng.integers(-3, 110, 150, dtype=np.int32)
    table = rng.integers(-(2**31), 2**31 - 1, 100, dtype=np.int32)
    expected = table[np.clip(index, 0, 99)]
    return (3,), [index, table, _empty(150), 150, 99], {2: expected}


@_case("index_ptr x_ptr out_ptr", "n", TILE=64)
def discrete_store(rng):
    index = rng.permutation(200)[:150].astype(np.int32)
    index[rng.integers(0, 150, 20)] = -1
    x = rng.integers(0, 1000, 150, dtype=np.int32)
    expected = _empty(200)
    expected[index[index >= 0]] = x[index >= 0]
    return (3,), [index, x, _empty(200), 150], {2: expected}


@_case("index_ptr table_ptr out_ptr", "n", TILE=256, WINDOW=512)
def window_gather(rng):
    index = rng.integers(-5, 600, 700, dtype=np.int32)
    table = rng.integers(-(2**31), 2**31 - 1, 512, dtype=np.int32)
    table[:4] = [0x7F800001, -0x00400000, 16777217, -(2**31)]  # signalling NaN, NaN, odd, -0.0
    index[:4] = range(4)
    expected = table[np.clip(index, 0, 511)]
    return (3,), [index, table, _empty(700), 700], {2: expected}


@_case("column_ptr table_ptr out_ptr", "rows stride", ROWS=32, WINDOW=128)
def rows_gather(rng):
    column = rng.integers(0, 128, 70, dtype=np.int32)
    table = rng.integers(0, 2**31 - 1, 70 * 144, dtype=np.int32)
    expected = table[np.arange(70) * 144 + column]
    return (3,), [column, table, _empty(70), 70, 144], {2: expected}


@_case("x_ptr out_ptr", "rows columns stride", ROWS=16, COLUMNS=64)
def copy_2d(rng):
    columns = int(rng.integers(1, 65))
    x = rng.integers(0, 1000, (50, 77), dtype=np.int32)
    expected = np.full((50, 77), -99, np.int32)
    expected[:, :columns] = x[:, :columns] * 2
    return (4,), [x, np.full((50, 77), -99, np.int32), 50, columns, 77], {1: expected}


@_case("x_ptr out_ptr", "n", TILE=1024)
def reductions(rng):
    x = rng.integers(-(2**20), 2**20, 2048, dtype=np.int32)
    tiles = x.reshape(2, 1024)
    expected = np.stack([tiles.sum(1), tiles.min(1), tiles.max(1)], 1).reshape(-1)
    return (2,), [x, _empty(6), 2048], {1: expected.astype(np.int32)}


@_case("x_ptr out_ptr", "n mode", TILE=256)
def branches(rng):
    mode = int(rng.integers(0, 4))
    x = rng.integers(0, 1000, 600, dtype=np.int32)
    return (5,), [x, _empty(600), 600, mode], {1: x + 3 if mode == 1 else x * 3 * mode}


@_case("x_ptr out_ptr", "n", wide="x_ptr out_ptr", TILE=1024)
def widen(rng):
    n = int(rng.integers(1, 5000))
    x = rng.integers(-(2**29), 2**29, n)
    return (2,), [x, _empty(n, np.int64), n], {1: x * 2 + 1}


@_case("x_ptr out_ptr", "n factor", wide="out_ptr", TILE=64)
def wide_product(rng):
    x = rng.integers(-(2**31), 2**31 - 1, 100, dtype=np.int32)
    return (2,), [x, _empty(100, np.int64), 100, 1000], {1: x.astype(np.int64) * 1000}


@_case("x_ptr count_ptr", "n limit", TILE=1024)
def count_faults(rng):
    x = rng.integers(-50, 1000, 3500, dtype=np.int32)
    limit = int(rng.choice([900, 2000]))
    return (
        (4,),
        [x, np.array([7], np.int32), 3500, limit],
        {1: np.array([7 + (x >= limit).sum()], np.int32)},
    )


@_case("x_ptr count_ptr", "n limit", TILE=1024)
def count_faults_by_program(rng):
    x = rng.integers(-50, 1000, 4096, dtype=np.int32)
    expected = (x.reshape(4, 1024) >= 900).sum(1).astype(np.int32)
    return (4,), [x, _empty(4), 4096, 900], {1: expected}


@_case("starts_ptr out_ptr", "num_reqs", STEPS=6)
def find_request(rng):
    num_reqs = int(rng.integers(1, 33))
    lengths = rng.integers(0, 4, num_reqs)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    n = int(starts[-1])
    if n == 0:
        starts, lengths, n = starts + 0, lengths, 0
    expected = np.repeat(np.arange(num_reqs), lengths).astype(np.int32)
    return (max(n, 1),), [starts, _empty(max(n, 1)), num_reqs], {1: expected} if n else {}


@_case("starts_ptr out_ptr", "n num_reqs", TILE=256)
def requests_of_tile(rng):
    lengths = rng.integers(0, 60, 20)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    n = int(starts[-1])
    expected = np.repeat(np.arange(20), lengths).astype(np.int32)
    return _tiles(n, 256), [starts, _empty(n), n, 20], {1: expected}


@_case("starts_ptr out_ptr", "n", TILE=32)
def begun_entries(rng):
    n = int(rng.integers(0, 33))
    starts = np.sort(rng.integers(0, 40, n)).astype(np.int32)
    expected = np.searchsorted(starts, np.arange(32), side="right").astype(np.int32)
    return (1,), [np.append(starts, np.int32(7)), _empty(32), n], {1: expected}


@_case("desc_ptr x_ptr out_ptr", "n stride", GROUPS=4, TILE=256)
def descriptors(rng):
    table = np.array([[3, 1, 1], [5, 0, 0], [7, 2, 1], [1, 3, 1]], np.int32)
    x = rng.integers(0, 1000, 500, dtype=np.int32)
    expected = np.stack([np.where(e, x * s >> h, -1) for s, h, e in table]).astype(np.int32)
    return (2,), [table, x, np.full((4, 500), -99, np.int32), 500, 500], {2: expected}


CASES["static_groups"] = Case(
    Variant("static_groups", samples.static_groups, CASES["descriptors"].variant.signature,
            CASES["descriptors"].variant.constexprs),
    descriptors,
)  # fmt: skip


@_case("starts_ptr out_ptr", "num_reqs")
def find_request_while(rng):
    return find_request(rng)


@_case("row_ptr column_ptr table_ptr out_ptr", "n stride", ROWS=32, WINDOW=128)
def indexed_rows_gather(rng):
    row = rng.permutation(80)[:70].astype(np.int32)
    column = rng.integers(0, 128, 70, dtype=np.int32)
    table = rng.integers(0, 2**31 - 1, 80 * 144, dtype=np.int32)
    return (3,), [row, column, table, _empty(70), 70, 144], {3: table[row * 144 + column]}


def slots(row, position, table, filled, block):
    """The mapping of one paged group without context parallelism, -1 where there is no slot."""
    column = position // block
    good = (row >= 0) & (position >= 0) & (column < filled[np.maximum(row, 0)])
    entry = table[np.where(good, row, 0), np.where(good, column, 0)]
    return np.where(good, entry.astype(np.int64) * block + position % block, -1)


@_case("row_ptr position_ptr table_ptr filled_ptr out_ptr", "n stride shift mask",
       wide="position_ptr out_ptr", TILE=32)  # fmt: skip
def decode_tile(rng):
    rows, width, n = 100, 64, 70
    table = rng.integers(0, 2**20, (rows, width), dtype=np.int32)
    filled = rng.integers(0, width + 1, rows, dtype=np.int32)
    row = rng.permutation(rows)[:n].astype(np.int32)
    row[rng.integers(0, n, 5)] = -1
    position = rng.integers(-20, width * 16 + 200, n)
    expected = slots(row, position, table, filled, 16)
    return (3,), [row, position, table, filled, _empty(n, np.int64), n, width, 4, 15], {4: expected}


@_case("row_ptr starts_ptr position_ptr table_ptr filled_ptr out_ptr", "stride shift mask",
       wide="position_ptr out_ptr", TILE=256, WINDOW=64)  # fmt: skip
def request_window(rng):
    rows, width, requests = 20, 192, 9
    table = rng.integers(0, 2**20, (rows, width), dtype=np.int32)
    filled = rng.integers(0, width + 1, rows, dtype=np.int32)
    row = rng.permutation(rows)[:requests].astype(np.int32)
    row[rng.integers(0, requests)] = -1
    lengths = rng.integers(0, 700, requests)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    first = rng.integers(0, 2500, requests)
    position = np.concatenate([f + np.arange(k) for f, k in zip(first, lengths, strict=True)])
    position[rng.integers(0, position.size, 30)] = -3
    expected = slots(np.repeat(row, lengths), position, table, filled, 16)
    arguments = [row, starts, position, table, filled, _empty(position.size, np.int64)]
    return (requests,), [*arguments, width, 4, 15], {5: expected}


@_case("pointers_ptr out_ptr x_ptr y_ptr", "n", wide="pointers_ptr", TILE=256)
def pointer_table(rng):
    x, y = (rng.integers(0, 99, 200, dtype=np.int32) for _ in range(2))
    return (2,), [Pointers([3, 2]), _empty(400), x, y, 200], {1: np.concatenate([y, x])}


@_case("x_ptr out_ptr", "low high", TILE=256)
def two_bounds(rng):
    low, high = np.sort(rng.integers(0, 700, 2)).tolist()
    x = rng.integers(0, 99, 700, dtype=np.int32)
    expected = _empty(700)
    expected[low:high] = x[low:high] + 1
    return (3,), [x, _empty(700), low, high], {1: expected}


@_case("x_ptr out_ptr", "n stride", ROWS=4, TILE=256)
def broadcast_rows(rng):
    x = rng.integers(0, 99, 600, dtype=np.int32)
    out = np.full((4, 640), -99, np.int32)
    expected = out.copy()
    expected[:, :600] = x
    return (3,), [x, out, 600, 640], {1: expected}
