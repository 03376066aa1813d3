"""Which tokens a program takes, in which pieces, and from tokens to their requests (formula.py).

Programs have equal work, not equally many tokens: where queries are long an entry costs what
ENTRY_WEIGHT tokens do, so that a batch's many decodes are dealt to many programs. A program finds
its share by searching for it in query_start_loc[b] + ENTRY_WEIGHT·b. Any cut is right.
"""

import triton
import triton.language as tl

from fused_slots.kernels.ascend.formula import clamp_rows, load_divisor, slots_of_tile
from fused_slots.kernels.ascend.layout import (
    ENTRIES,
    ENTRY_WEIGHT,
    FAULTS,
    FLAT,
    PAD_TILE,
    POW2,
    REPLAY,
    RING,
    RUNS,
    SHARDED,
    SHORT_PIECE,
    SPAN,
    STAGED,
    TILE,
)
from fused_slots.kernels.ascend.run import map_run
from fused_slots.kernels.ascend.table import gather_in_tile
from fused_slots.kernels.common import count_cut_tokens, pad_tail
from fused_slots.kernels.layout import (
    COLUMN_SIZE,
    INT32_MAX,
    KIND,
    KIND_RING,
    KIND_STATE,
    OFFSET,
    OFFSET_UNIT,
    PAD,
    TOKENS_OVER_VIEW,
    WIDTH,
)


@triton.jit
def find_entry(query_start_loc_ptr, num_reqs, target, begin, mean, WEIGHT: tl.constexpr):
    """The last batch entry b with query_start_loc[b] + WEIGHT·b <= target, by scalars.

    Where all entries cost `mean`, it is guessed.
    """
    low = 0
    high = num_reqs
    if num_reqs > 1:
        guess = tl.minimum((target - begin) // mean, num_reqs - 1)
        start = tl.load(query_start_loc_ptr + guess) + WEIGHT * guess
        following = tl.load(query_start_loc_ptr + guess + 1) + WEIGHT * guess + WEIGHT
        right = (start <= target) & (target < following)
        low = tl.where(right, guess, low)
        high = tl.where(right, guess + 1, high)
    while high - low > 1:
        middle = (low + high) // 2
        later = tl.load(query_start_loc_ptr + middle) + WEIGHT * middle > target
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle)
    return low


@triton.jit
def first_of_share(work, begin, query_start_loc_ptr, num_reqs, mean):
    """The first token behind so much work, and its entry or one in front of that.

    A token costs 1, an entry's end ENTRY_WEIGHT; near an entry's begin or end the token is that,
    since pieces cost more than tokens.
    """
    entry = find_entry(query_start_loc_ptr, num_reqs, begin + work, begin, mean, ENTRY_WEIGHT)
    start = tl.maximum(tl.load(query_start_loc_ptr + entry), begin)
    following = tl.load(query_start_loc_ptr + tl.minimum(entry + 1, num_reqs))
    token = begin + work - ENTRY_WEIGHT * entry
    near_end = token + ENTRY_WEIGHT > following
    near_begin = (token < following) & (token < start + ENTRY_WEIGHT)
    return tl.where(near_begin, start, tl.where(near_end, following, token)), entry


@triton.jit
def requests_of_tile(
    token, entry, idx_mapping_ptr, query_start_loc_ptr, replay_start_ptr, replay_len_ptr,
    replay_window, num_reqs, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Row, replay start and length of each token of a tile whose first is of batch entry `entry`.

    Its tokens are of ENTRIES entries at most, whose numbers come in one transfer each.
    """
    number = tl.arange(0, ENTRIES)
    exists = number < num_reqs - entry
    begin = tl.load(query_start_loc_ptr + entry + number, mask=exists, other=INT32_MAX)
    # A sum of signs: -1 for each entry that has begun.
    behind = token + 1
    begun = tl.sum((begin[:, None] - behind[None, :]) >> 31, axis=0)
    lane = tl.maximum(-1 - begun, 0)
    row = tl.load(idx_mapping_ptr + entry + number, mask=exists, other=-1)
    row = gather_in_tile(clamp_rows(row, max_num_reqs), lane)
    start, replayed = token * 0, token * 0
    if REPLAY & FLAGS:
        start = tl.load(replay_start_ptr + entry + number, mask=exists, other=0)
        start = gather_in_tile(start, lane)
        if replay_window < 0:
            replayed = tl.load(replay_len_ptr + entry + number, mask=exists, other=0)
            replayed = tl.maximum(gather_in_tile(replayed, lane), 0)
        else:
            replayed = tl.where(start == 0, 0, replay_window)
    return row, start, replayed


@triton.jit
def map_tile(
    first, stop, entry, single, slots_ptr, idx_mapping_ptr, query_start_loc_ptr, positions_ptr,
    replay_start_ptr, replay_len_ptr, replay_window, num_reqs, line_ptr, width, column_divisor,
    table_ptr, lengths_ptr, plane, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Map a tile's tokens from `first` on, none from `stop` on, whatever they are.

    They are of entry `entry` and those behind it, unless they are a `single` one's.
    """
    token = first + tl.arange(0, TILE)
    live = token < stop
    position = tl.load(positions_ptr + token, mask=live, other=-1)
    start, replayed = token * 0, token * 0
    if FLAT & FLAGS:
        row = tl.load(idx_mapping_ptr + token, mask=live, other=-1)
        row = clamp_rows(row, max_num_reqs)
    else:
        row, start, replayed = requests_of_tile(
            token, entry, idx_mapping_ptr, query_start_loc_ptr, replay_start_ptr, replay_len_ptr,
            replay_window, num_reqs, max_num_reqs, FLAGS,
        )  # fmt: skip
    slots = slots_of_tile(
        row, position, start, replayed, positions_ptr, first, stop, single, line_ptr, width,
        column_divisor, table_ptr, lengths_ptr, plane, max_num_reqs, slots_ptr.dtype.element_ty,
        TILE, FLAGS,
    )  # fmt: skip
    tl.store(slots_ptr + token, slots, mask=live)


@triton.jit
def map_pieces(
    first, end, entry, slots_ptr, idx_mapping_ptr, query_start_loc_ptr, positions_ptr,
    num_positions, replay_start_ptr, replay_len_ptr, replay_window, num_reqs, line_ptr, width,
    column_divisor, table_ptr, lengths_ptr, plane, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Map tokens [first, end): an entry's next tokens as a run, else tile by tile.

    `entry` is the first token's, or one in front of it.
    """
    # On-chip memory holds shorter runs of sharded groups, and in a step, which has other roles.
    HALF: tl.constexpr = SPAN // 2 if SHARDED & FLAGS else SPAN
    BARE: tl.constexpr = POW2 & FLAGS and slots_ptr.dtype.element_ty == tl.int32
    LONGEST: tl.constexpr = HALF // 2 if STAGED & FLAGS and not BARE else HALF
    token = first
    while token < end:
        stop = tl.minimum(token + TILE, end)
        single, mapped = 0, 0
        if (FLAT & FLAGS) == 0:
            while tl.load(query_start_loc_ptr + entry + 1) <= token:
                entry += 1
            if entry + ENTRIES < num_reqs:
                behind = tl.load(query_start_loc_ptr + entry + ENTRIES)
                stop = tl.minimum(stop, tl.maximum(behind, token + 1))
            if RUNS & FLAGS:
                last = tl.minimum(tl.load(query_start_loc_ptr + entry + 1), end)
                last = tl.minimum(last, token + LONGEST)
                if last - token > SHORT_PIECE:
                    single = 1
                    stop = last
                    mapped = map_run(
                        token, stop - token, entry, slots_ptr, idx_mapping_ptr, positions_ptr,
                        num_positions, replay_start_ptr, replay_len_ptr, replay_window, line_ptr,
                        width, column_divisor, table_ptr, lengths_ptr, plane, max_num_reqs, LONGEST,
                        FLAGS,
                    )  # fmt: skip
        # Under an if, since the compiler moves what tiles share in front of their loop.
        if mapped == 0:
            for tile in range(token, stop, TILE):
                map_tile(
                    tile, stop, entry, single, slots_ptr, idx_mapping_ptr, query_start_loc_ptr,
                    positions_ptr, replay_start_ptr, replay_len_ptr, replay_window, num_reqs,
                    line_ptr, width, column_divisor, table_ptr, lengths_ptr, plane, max_num_reqs,
                    FLAGS,
                )  # fmt: skip
        token = stop


@triton.jit
def map_share(
    x, num_tiles, begin, num_tokens, slots_ptr, idx_mapping_ptr, query_start_loc_ptr, positions_ptr,
    num_positions, replay_start_ptr, replay_len_ptr, replay_window, num_reqs, line_ptr, width,
    table_ptr, lengths_ptr, plane, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """Map the tokens of one of num_tiles programs, each of which has as much work as the others."""
    number = tl.maximum(num_tokens - begin, 0)
    entries = tl.maximum(num_reqs, 1)
    mean = tl.maximum(number // entries, 1)
    if RUNS & FLAGS:
        work = number + ENTRY_WEIGHT * (entries - 1)
        share = (work + num_tiles - 1) // num_tiles
        mean += ENTRY_WEIGHT
        first, entry = first_of_share(x * share, begin, query_start_loc_ptr, num_reqs, mean)
        end, _ = first_of_share(x * share + share, begin, query_start_loc_ptr, num_reqs, mean)
        # Whatever query_start_loc holds nothing in front of the first token is mapped.
        first = tl.maximum(first, begin)
        # Where an entry is cut short the last share ends with it.
        end = tl.where(x == num_tiles - 1, num_tokens, tl.minimum(end, num_tokens))
    else:
        share = (number + num_tiles - 1) // num_tiles
        first, entry = begin + x * share, 0
        end = tl.minimum(first + share, num_tokens)
        if (FLAT & FLAGS) == 0:
            entry = find_entry(query_start_loc_ptr, num_reqs, first, begin, mean, 0)
    map_pieces(
        first, end, entry, slots_ptr, idx_mapping_ptr, query_start_loc_ptr, positions_ptr,
        num_positions, replay_start_ptr, replay_len_ptr, replay_window, num_reqs, line_ptr, width,
        load_divisor(line_ptr, COLUMN_SIZE, FLAGS), table_ptr, lengths_ptr, plane, max_num_reqs,
        FLAGS,
    )  # fmt: skip


@triton.jit
def pad_head(slots_ptr, begin, num_tokens, program):
    """Write PAD in front of the first token, should there be room; program 0 does it."""
    if program == 0:
        for first in range(0, tl.minimum(begin, num_tokens), PAD_TILE):
            token = first + tl.arange(0, PAD_TILE)
            value = tl.full([PAD_TILE], PAD, slots_ptr.dtype.element_ty)
            tl.store(slots_ptr + token, value, mask=token < tl.minimum(begin, num_tokens))


@triton.jit
def count_narrow_view(line_ptr, num_tokens, num_tokens_padded):
    """Count a call whose view is narrower than its tokens."""
    if num_tokens > num_tokens_padded:
        tl.atomic_add(line_ptr + FAULTS + TOKENS_OVER_VIEW, 1)


@triton.jit
def map_and_pad(
    x, num_tiles, num_programs, slots_ptr, capacity, idx_mapping_ptr, query_start_loc_ptr,
    positions_ptr, replay_start_ptr, replay_len_ptr, replay_window, num_reqs, num_positions,
    num_tokens_padded, line_ptr, arena_ptr, lengths_ptr, plane, max_num_reqs, FLAGS: tl.constexpr,
):  # fmt: skip
    """What program x of num_programs does for the slots of a group.

    The first num_tiles map tokens, the others write PAD; if there are no others those do it.
    """
    given, begin = num_positions, 0
    if (FLAT & FLAGS) == 0:
        given = tl.load(query_start_loc_ptr + num_reqs)
        begin = tl.maximum(tl.load(query_start_loc_ptr), 0)
    num_tokens = tl.maximum(tl.minimum(given, tl.minimum(capacity, num_positions)), 0)
    # A group without slots has no tokens: all of its programs write PAD.
    kind = tl.load(line_ptr + KIND)
    slotless = kind == KIND_STATE
    first_pad = tl.where(slotless | (num_tiles == num_programs), 0, num_tiles)
    num_tiles = tl.where(slotless, 0, num_tiles)
    if x < num_tiles:
        width = tl.load(line_ptr + WIDTH)
        if RING & FLAGS:
            width = tl.where(kind == KIND_RING, 0, width)
        map_share(
            x, num_tiles, begin, num_tokens, slots_ptr, idx_mapping_ptr, query_start_loc_ptr,
            positions_ptr, num_positions, replay_start_ptr, replay_len_ptr, replay_window, num_reqs,
            line_ptr, width, arena_ptr + tl.load(line_ptr + OFFSET).to(tl.int64) * OFFSET_UNIT,
            lengths_ptr, plane, max_num_reqs, FLAGS,
        )  # fmt: skip
    if x >= first_pad:
        if x == first_pad:
            count_cut_tokens(line_ptr + FAULTS, 0, 1, given, num_tokens)
            count_narrow_view(line_ptr, num_tokens, num_tokens_padded)
        pad_begin = tl.where(slotless, 0, num_tokens)
        pad_head(slots_ptr, tl.where(slotless, 0, begin), num_tokens, x - first_pad)
        pad_tail(slots_ptr, pad_begin, capacity, x - first_pad, num_programs - first_pad, PAD_TILE)
