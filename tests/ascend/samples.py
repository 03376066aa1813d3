"""Small Triton kernels, one lowering question each, that the Ascend machinery is proved on.

They are no part of the package. Each isolates a form that a slot-mapping kernel wants to use;
tests compile them, execute the compiled code against a NumPy oracle and pin what they cost.
"""

import triton
import triton.language as tl


@triton.jit
def shift_and_mask(x_ptr, out_ptr, n, shift, mask, TILE: tl.constexpr):
    """out = (x >> shift) * 1000 + (x & mask)."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + offset, (x >> shift) * 1000 + (x & mask), mask=offset < n)


@triton.jit
def modulo(x_ptr, out_ptr, n, divisor, TILE: tl.constexpr):
    """out = x % divisor: the scalar fallback on 910B."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + offset, x % divisor, mask=offset < n)


@triton.jit
def floor_divide(x_ptr, out_ptr, n, divisor, TILE: tl.constexpr):
    """out = x // divisor: through float32 on 910B, silently wrong from 2**24 on."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + offset, x // divisor, mask=offset < n)


@triton.jit
def subtract_multiple(x_ptr, out_ptr, n, divisor, TILE: tl.constexpr):
    """out = x - x // divisor * divisor: the remainder without a scalar loop."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + offset, x - x // divisor * divisor, mask=offset < n)


@triton.jit
def corrected_divide(x_ptr, quotient_ptr, remainder_ptr, n, divisor, TILE: tl.constexpr):
    """Quotient and remainder, exact beyond 2**24: one step of correction after the division."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    quotient = x // divisor
    remainder = x - quotient * divisor
    below = remainder >> 31
    quotient += below
    remainder += below & divisor
    above = (divisor - 1 - remainder) >> 31
    quotient -= above
    remainder -= above & divisor
    tl.store(quotient_ptr + offset, quotient, mask=offset < n)
    tl.store(remainder_ptr + offset, remainder, mask=offset < n)


@triton.jit
def select_and_clamp(x_ptr, y_ptr, out_ptr, n, low, high, TILE: tl.constexpr):
    """out = -1 where x < 0, high where x == y, else x clamped to [low, high]."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    y = tl.load(y_ptr + offset, mask=offset < n, other=0)
    clamped = tl.minimum(tl.maximum(x, low), high)
    clamped = tl.where(x == y, high, clamped)
    tl.store(out_ptr + offset, tl.where(x < 0, -1, clamped), mask=offset < n)


@triton.jit
def copy_range(x_ptr, out_ptr, starts_ptr, TILE: tl.constexpr):
    """Program p copies [starts[p], starts[p + 1]): bounds on both sides, no select."""
    begin = tl.load(starts_ptr + tl.program_id(0))
    end = tl.load(starts_ptr + tl.program_id(0) + 1)
    for first in range(begin, end, TILE):
        offset = first + tl.arange(0, TILE)
        x = tl.load(x_ptr + offset, mask=offset < end, other=0)
        tl.store(out_ptr + offset, x + 1, mask=offset < end)


@triton.jit
def store_with_data_mask(x_ptr, out_ptr, starts_ptr, TILE: tl.constexpr):
    """A store mask made of loaded data: read-select-write of the whole tile. Never do this."""
    offset = tl.load(starts_ptr + tl.program_id(0)) + tl.arange(0, TILE)
    end = tl.load(starts_ptr + tl.program_id(0) + 1)
    x = tl.load(x_ptr + offset, mask=offset < end, other=-1)
    tl.store(out_ptr + offset, x, mask=x >= 0)


@triton.jit
def discrete_load(index_ptr, table_ptr, out_ptr, n, last, TILE: tl.constexpr):
    """out = table[clamp(index, 0, last)]: one scalar GM load an element."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + offset, mask=offset < n, other=0)
    index = tl.minimum(tl.maximum(index, 0), last)
    tl.store(out_ptr + offset, tl.load(table_ptr + index), mask=offset < n)


@triton.jit
def discrete_load_masked(index_ptr, table_ptr, out_ptr, n, TILE: tl.constexpr):
    """The same with a mask instead of a clamp: masked-off lanes are read all the same."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + offset, mask=offset < n, other=-1)
    value = tl.load(table_ptr + index, mask=index >= 0, other=-7)
    tl.store(out_ptr + offset, value, mask=offset < n)


@triton.jit
def discrete_store(index_ptr, x_ptr, out_ptr, n, TILE: tl.constexpr):
    """out[index] = x: one DMA an element, and here the mask is honoured."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + offset, mask=offset < n, other=-1)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + index, x, mask=index >= 0)


@triton.jit
def window_gather(index_ptr, table_ptr, out_ptr, n, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """out = table[index] from a window of the table in UB, exact through a float32 bitcast."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(index_ptr + offset, mask=offset < n, other=0)
    window = tl.load(table_ptr + tl.arange(0, WINDOW)).to(tl.float32, bitcast=True)
    index = tl.minimum(tl.maximum(index, 0), WINDOW - 1)
    value = tl.gather(window, index, 0).to(tl.int32, bitcast=True)
    tl.store(out_ptr + offset, value, mask=offset < n)


@triton.jit
def rows_gather(
    column_ptr, table_ptr, out_ptr, rows, stride, ROWS: tl.constexpr, WINDOW: tl.constexpr
):
    """One entry of each of ROWS consecutive table rows: one 2-D DMA, one gather in UB."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.load(column_ptr + row, mask=row < rows, other=0)
    window = tl.load(
        table_ptr + row[:, None] * stride + tl.arange(0, WINDOW)[None, :],
        mask=(row < rows)[:, None],
        other=0,
    )
    flat = tl.reshape(window, (ROWS * WINDOW,)).to(tl.float32, bitcast=True)
    index = tl.arange(0, ROWS) * WINDOW + tl.minimum(tl.maximum(column, 0), WINDOW - 1)
    value = tl.gather(flat, index, 0).to(tl.int32, bitcast=True)
    tl.store(out_ptr + row, value, mask=row < rows)


@triton.jit
def copy_2d(x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A [ROWS, COLUMNS] tile of a strided matrix, bounded on both axes, doubled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * stride + column[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask, other=0) * 2, mask=mask)


@triton.jit
def reductions(x_ptr, out_ptr, n, TILE: tl.constexpr):
    """Sum, minimum and maximum of a program's tile, as three scalars."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + tl.program_id(0) * 3, tl.sum(x, 0))
    tl.store(out_ptr + tl.program_id(0) * 3 + 1, tl.min(x, 0))
    tl.store(out_ptr + tl.program_id(0) * 3 + 2, tl.max(x, 0))


@triton.jit
def branches(x_ptr, out_ptr, n, mode, TILE: tl.constexpr):
    """Early return, a runtime if with an else, and a runtime loop with a carried scalar."""
    pid = tl.program_id(0)
    if pid * TILE >= n:
        return
    rounds = 0
    for _ in range(mode):
        rounds += 3
    offset = pid * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    if mode == 1:
        tl.store(out_ptr + offset, x + rounds, mask=offset < n)
    else:
        tl.store(out_ptr + offset, x * rounds, mask=offset < n)


@triton.jit
def widen(x_ptr, out_ptr, n, TILE: tl.constexpr):
    """int64 in, int32 arithmetic, int64 out; a persistent loop over the tiles."""
    for first in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
        offset = first + tl.arange(0, TILE)
        x = tl.load(x_ptr + offset, mask=offset < n, other=0).to(tl.int32)
        tl.store(out_ptr + offset, (x * 2 + 1).to(tl.int64), mask=offset < n)


@triton.jit
def wide_product(x_ptr, out_ptr, n, factor, TILE: tl.constexpr):
    """An int64 product of vectors: scalar loops on 910B."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(out_ptr + offset, x.to(tl.int64) * factor, mask=offset < n)


@triton.jit
def count_faults(x_ptr, count_ptr, n, limit, TILE: tl.constexpr):
    """How many x are at or above limit: a tile sum, then one atomic only where there are any."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    faults = tl.sum((limit - 1 - tl.maximum(x, 0)) >> 31, 0)
    if faults < 0:
        tl.atomic_add(count_ptr, -faults)


@triton.jit
def count_faults_by_program(x_ptr, count_ptr, n, limit, TILE: tl.constexpr):
    """The same count, one plain store a program."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    faults = tl.sum((limit - 1 - tl.maximum(x, 0)) >> 31, 0)
    tl.store(count_ptr + tl.program_id(0), -faults)


@triton.jit
def find_request(starts_ptr, out_ptr, num_reqs, STEPS: tl.constexpr):
    """The request that program p's token belongs to: binary search with scalar loads."""
    token = tl.program_id(0)
    low = 0
    high = num_reqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        inside = tl.load(starts_ptr + tl.minimum(middle, num_reqs)) <= token
        low = tl.where(inside & (middle < high), middle + 1, low)
        high = tl.where(inside, high, middle)
    tl.store(out_ptr + token, low - 1)


@triton.jit
def requests_of_tile(starts_ptr, out_ptr, n, num_reqs, TILE: tl.constexpr):
    """The request of every token of a tile: one masked add a request that begins in it."""
    first = tl.program_id(0) * TILE
    offset = first + tl.arange(0, TILE)
    request = tl.zeros((TILE,), tl.int32) - 1
    for r in range(num_reqs):
        start = tl.load(starts_ptr + r)
        request += ((start - 1 - offset) >> 31) & 1
    tl.store(out_ptr + offset, request, mask=offset < n)


@triton.jit
def descriptors(desc_ptr, x_ptr, out_ptr, n, stride, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """A packed int32 table of (scale, shift, enabled) a group, read by scalar loads."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    for group in range(GROUPS):
        scale = tl.load(desc_ptr + group * 3)
        shift = tl.load(desc_ptr + group * 3 + 1)
        enabled = tl.load(desc_ptr + group * 3 + 2)
        value = (x * scale) >> shift
        value = value * enabled + (enabled - 1)
        tl.store(out_ptr + group * stride + offset, value, mask=offset < n)


@triton.jit
def indexed_rows_gather(
    row_ptr, column_ptr, table_ptr, out_ptr, n, stride, ROWS: tl.constexpr, WINDOW: tl.constexpr
):
    """As rows_gather, but the rows are loaded numbers: one DMA a row instead of one in all."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(row_ptr + at, mask=at < n, other=0)
    column = tl.load(column_ptr + at, mask=at < n, other=0)
    window = tl.load(table_ptr + row[:, None] * stride + tl.arange(0, WINDOW)[None, :])
    flat = tl.reshape(window, (ROWS * WINDOW,)).to(tl.float32, bitcast=True)
    index = tl.arange(0, ROWS) * WINDOW + column
    value = tl.gather(flat, index, 0).to(tl.int32, bitcast=True)
    tl.store(out_ptr + at, value, mask=at < n)


@triton.jit
def decode_tile(
    row_ptr, position_ptr, table_ptr, filled_ptr, out_ptr, n, stride, shift, mask,
    TILE: tl.constexpr,
):  # fmt: skip
    """One token a request, TILE requests a program: discrete loads at clamped addresses."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(row_ptr + at, mask=at < n, other=-1)
    position = tl.load(position_ptr + at, mask=at < n, other=-1).to(tl.int32)
    column = position >> shift
    safe_row = tl.maximum(row, 0)
    filled = tl.load(filled_ptr + safe_row)
    good = (row >= 0) & (position >= 0) & (column < filled)
    block = tl.load(table_ptr + tl.where(good, safe_row * stride + column, 0))
    slot = tl.where(good, (block << shift) + (position & mask), -1)
    tl.store(out_ptr + at, slot.to(tl.int64), mask=at < n)


@triton.jit
def request_window(
    row_ptr, starts_ptr, position_ptr, table_ptr, filled_ptr, out_ptr, stride, shift, mask,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One request a program, any length: a window of the row in UB for each tile of tokens.

    Right for tiles whose columns lie within WINDOW of their lowest; others need another form.
    """
    row = tl.load(row_ptr + tl.program_id(0))
    begin = tl.load(starts_ptr + tl.program_id(0))
    end = tl.load(starts_ptr + tl.program_id(0) + 1)
    live = row >= 0
    row = tl.maximum(row, 0)
    filled = tl.load(filled_ptr + row)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        position = tl.load(position_ptr + at, mask=at < end, other=-1).to(tl.int32)
        column = position >> shift
        lowest = tl.min(tl.where(position < 0, 2147483647, column), 0)
        base = tl.minimum(lowest, tl.maximum(filled - WINDOW, 0))
        lane = tl.arange(0, WINDOW)
        window = tl.load(
            table_ptr + row * stride + base + lane, mask=lane < filled - base, other=0
        ).to(tl.float32, bitcast=True)
        index = tl.minimum(tl.maximum(column - base, 0), WINDOW - 1)
        block = tl.gather(window, index, 0).to(tl.int32, bitcast=True)
        good = (position >= 0) & (column < tl.where(live, filled, 0))
        slot = tl.where(good, (block << shift) + (position & mask), -1)
        tl.store(out_ptr + at, slot.to(tl.int64), mask=at < end)


@triton.jit
def pointer_table(pointers_ptr, out_ptr, x_ptr, y_ptr, n, TILE: tl.constexpr):
    """Program p copies n elements from the buffer that entry p of a table of addresses names."""
    source = tl.load(pointers_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, TILE)
    x = tl.load(source + lane, mask=lane < n, other=0)
    tl.store(out_ptr + tl.program_id(0) * n + lane, x, mask=lane < n)


@triton.jit
def two_bounds(x_ptr, out_ptr, low, high, TILE: tl.constexpr):
    """A mask of two bounds, (o >= low) & (o < high): still a plain bounded transfer."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (offset >= low) & (offset < high)
    tl.store(out_ptr + offset, tl.load(x_ptr + offset, mask=mask, other=0) + 1, mask=mask)


@triton.jit
def broadcast_rows(x_ptr, out_ptr, n, stride, ROWS: tl.constexpr, TILE: tl.constexpr):
    """A tile written to ROWS rows at once by one 2-D DMA."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    rows = x[None, :] + tl.zeros((ROWS, TILE), tl.int32)
    at = tl.arange(0, ROWS)[:, None] * stride + offset[None, :]
    tl.store(out_ptr + at, rows, mask=(offset < n)[None, :])


@triton.jit
def masked_scalar_atomic(x_ptr, count_ptr, n, limit, TILE: tl.constexpr):
    """An atomic with a scalar mask: the mask is dropped. Put it under a runtime if instead."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.sum(tl.load(x_ptr + offset, mask=offset < n, other=0), 0)
    tl.atomic_add(count_ptr, total, mask=total > limit)


@triton.jit
def find_request_while(starts_ptr, out_ptr, num_reqs):
    """Binary search with a while loop of scalars: low such that starts[low] <= token."""
    token = tl.program_id(0)
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    tl.store(out_ptr + token, low)


@triton.jit
def static_groups(desc_ptr, x_ptr, out_ptr, n, stride, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """As descriptors, with the loop over groups unrolled."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    for group in tl.static_range(GROUPS):
        scale = tl.load(desc_ptr + group * 3)
        shift = tl.load(desc_ptr + group * 3 + 1)
        enabled = tl.load(desc_ptr + group * 3 + 2)
        value = (x * scale) >> shift
        value = value * enabled + (enabled - 1)
        tl.store(out_ptr + group * stride + offset, value, mask=offset < n)


@triton.jit
def wide_counter(x_ptr, count_ptr, n, TILE: tl.constexpr):
    """A conditional count into an int64: an in-order lock under an if, which hangs the device."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.sum(tl.load(x_ptr + offset, mask=offset < n, other=0), 0)
    if total > 0:
        tl.atomic_add(count_ptr, total.to(tl.int64))


@triton.jit
def atomic_ticket(x_ptr, count_ptr, out_ptr, n, TILE: tl.constexpr):
    """An atomic whose old value is used: an in-order lock, whatever the type."""
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.sum(tl.load(x_ptr + offset, mask=offset < n, other=0), 0)
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(count_ptr, total))


@triton.jit
def gather_int32(index_ptr, table_ptr, out_ptr, TILE: tl.constexpr):
    """tl.gather of int32: refused by the front end."""
    lane = tl.arange(0, TILE)
    table = tl.load(table_ptr + lane)
    tl.store(out_ptr + lane, tl.gather(table, tl.load(index_ptr + lane), 0))


@triton.jit
def unsigned_divide(x_ptr, out_ptr, divisor, TILE: tl.constexpr):
    """uint32 division: refused by the 910B compiler."""
    lane = tl.arange(0, TILE)
    quotient = tl.load(x_ptr + lane).to(tl.uint32) // divisor.to(tl.uint32)
    tl.store(out_ptr + lane, quotient.to(tl.int32))


@triton.jit
def too_large(x_ptr, y_ptr, out_ptr, TILE: tl.constexpr):
    """A tile that needs more UB than a core has."""
    lane = tl.arange(0, TILE)
    x = tl.load(x_ptr + lane)
    y = tl.load(y_ptr + lane)
    tl.store(out_ptr + lane, tl.where(x < y, x * 2, y * 3))


@triton.jit
def begun_entries(starts_ptr, out_ptr, n, TILE: tl.constexpr):
    """How many of n sorted starts each lane has reached, by a sum of signs along rows."""
    lane = tl.arange(0, TILE)
    start = tl.load(starts_ptr + lane, mask=lane < n, other=2147483647)
    behind = lane + 1
    begun = tl.sum((start[:, None] - behind[None, :]) >> 31, axis=0)
    tl.store(out_ptr + lane, 0 - begun)
