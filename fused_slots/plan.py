"""From sizes to a launch: how tokens, batch entries and staged records are dealt to programs.

A plan looks at sizes alone, never at contents, so a captured graph that is replayed with other
contents in the same sizes stays right. Figures behind the choices: docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 128
"""Tokens of a program of the by-token mapping."""

STEP_TILE = 128
"""Tokens of a program of the step kernel that maps them."""

REQUEST_TILE = 256
"""Tokens of a tile of the by-request mapping (the base case)."""

PAD_TILE = 2048
"""Slots that a padding program writes at a time."""

MAX_PAD_PROGRAMS = 64

MAX_TILES = 32_768
"""Programs of a group that map tokens; CUDA launches at most 65,535 programs a group in all."""

MAX_WRITERS = 16_384
"""Programs of a group that write staged records, likewise."""

ENTRIES = 8
"""Batch entries of a gathering program."""

COLUMNS = 32
"""Columns that a gathering or writing program copies at a time, of each entry or record."""

STRETCH = 2048
"""Columns of one batch entry that are in flight together where it is copied by itself."""

STRETCH_COST = 128
"""Columns of a tile that take as long as one such stretch."""

PART = 512
"""Columns that are in flight together of a stretch that is not copied straight."""

LONG = 1024
"""Columns of the widest row for each program that shares the columns of the same batch entries."""

HELPERS = (3, 6)
"""How many share them at most: where rows and groups alone fill the device, and anywhere."""

GATHER_PROGRAMS = 600
"""Gathering programs that use the whole device; more of them cost steady steps more."""

CHUNK = 64
"""Columns of one staged record for each writing program, as long as MAX_WRITERS allows."""

RECORDS = 8
"""Staged records of a writing program."""

MAP_WARPS = 4
"""Warps of a program of the mapping kernels on CUDA."""

STEP_WARPS = 4
"""Warps of a program of the step kernel on CUDA."""


HEAVY_REGISTERS = 128
"""Registers that a thread may use on CUDA where kernels divide or record faults one by one."""


@dataclass(frozen=True)
class LaunchPlan:
    """How one step is laid out on the device, chosen from sizes alone.

    Args:
        grid: programs per axis; the first is the KV cache group.
        variant: the compiled kernel that runs; empty where nothing is compiled.
        reason: why this plan and no other, in a sentence.
    """

    grid: tuple[int, int]
    variant: str
    reason: str

    def describe(self) -> str:
        """The plan in one line."""
        what = self.variant or "no compiled kernel"
        return f"grid {self.grid[0]} x {self.grid[1]}, {what}: {self.reason}"


@dataclass(frozen=True)
class WarmupReport:
    """The variants that a warm-up compiled, and the seconds it took."""

    variants: list[str]
    seconds: float


@dataclass(frozen=True)
class TokenPlan:
    """How a batch's tokens are dealt to the programs of one group.

    Args:
        by_request: the base case, tiles of each request, instead of tiles of consecutive tokens.
        num_tiles: programs that map tokens (tiles of a request if `by_request`).
        num_pad: programs that write PAD behind the last token.
        query_len_inverse: 2^31 over the length of all queries where the sizes suggest that they
            are equally long; 0 = search for each token's request at once.
        search_steps: steps of that search.
        query_len: tokens of a request on average, rounded down.
    """

    by_request: bool
    num_tiles: int
    num_pad: int
    query_len_inverse: int
    search_steps: int
    query_len: int = 0


def plan_tokens(
    num_reqs: int, num_tokens: int, capacity: int, tile: int, by_request: bool = False
) -> TokenPlan:
    """Deal tokens to programs.

    Args:
        num_reqs: batch entries.
        num_tokens: tokens that the caller expects; more or fewer may come and are mapped right.
        capacity: width of the output.
        tile: tokens that a program maps at a time.
        by_request: take the base case.
    """
    if by_request:
        longest = ceil_div(num_tokens, max(num_reqs, 1))
        most = max(MAX_TILES // max(num_reqs, 1), 1)
        num_tiles, tail = min(ceil_div(max(longest, 1), tile), most), capacity
    else:
        num_tiles = min(max(ceil_div(min(num_tokens, capacity), tile), 1), MAX_TILES)
        tail = max(capacity - num_tiles * tile, 0)
    num_pad = min(max(ceil_div(tail, PAD_TILE), 1), MAX_PAD_PROGRAMS)
    query_len, rest = divmod(num_tokens, max(num_reqs, 1))
    query_len_inverse = 0
    if rest == 0 and query_len:
        # 2^31 itself travels as the int32 of the same bits.
        query_len_inverse = ceil_div(2**31, query_len) if query_len > 1 else -(2**31)
    # Each step narrows num_reqs entries to an eighth.
    search_steps = ceil_div(max(num_reqs - 1, 0).bit_length(), 3)
    return TokenPlan(by_request, num_tiles, num_pad, query_len_inverse, search_steps, query_len)


def reason(tokens: TokenPlan, tile: int, max_query_len: int | None = None) -> str:
    """Why tokens are dealt as they are.

    Args:
        tokens: the plan.
        tile: tokens that a program maps at a time.
        max_query_len: tokens of the longest request, if known; a plan is made without it.
    """
    if tokens.by_request:
        said = (
            f"FUSED_SLOTS_PLAN=by_request: {tokens.num_tiles} tiles of each request, then padding"
        )
        if max_query_len is not None:
            rounds = max(ceil_div(max_query_len, tokens.num_tiles * tile), 1)
            said += f"; the longest query takes {rounds} tiles of a program, one after another"
        return said
    said = (
        f"tiles of {tile} consecutive tokens, whichever requests they belong to, so that no mix "
        "of query lengths starves a program; then padding"
    )
    if max_query_len is not None:
        equal = tokens.query_len_inverse and tokens.query_len == max_query_len
        how = "computed, all queries being as long" if equal else "searched where it is not guessed"
        said += f"; each token's request is {how}"
    return said


def gather_helpers(widest: int, num_rows: int, num_groups: int) -> int:
    """Programs that share the columns of the same ENTRIES batch entries, in all launches alike.

    Args:
        widest: columns of the widest row.
        num_rows: rows of the tables, the most that a batch can have.
        num_groups: KV cache groups.
    """
    fewest, most = HELPERS
    filling = GATHER_PROGRAMS // max(ceil_div(num_rows, ENTRIES) * num_groups, 1)
    return max(min(ceil_div(widest, LONG), max(filling, fewest), most), 1)


def write_chunks(longest: int, num_records: int) -> int:
    """Programs that share the columns of the same RECORDS staged records.

    Args:
        longest: columns of the longest record.
        num_records: all records of a group, at least one.
    """
    most = MAX_WRITERS // ceil_div(num_records, RECORDS)
    return max(min(ceil_div(longest, CHUNK), most), 1)


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)
