"""Values that travel together through the device functions; an entry builds each of them once.

Triton keys its cache by the sources of functions, not by these: a changed order of fields must
change the lines that build them, too.
"""

from typing import Any, NamedTuple


class Tables(NamedTuple):
    """A manager's memory and sizes, the same in every launch; see the entries' arguments."""

    descriptor_ptr: Any
    arena_ptr: Any
    num_columns_ptr: Any
    faults_ptr: Any
    details_ptr: Any
    num_groups: Any
    max_num_reqs: Any
    interleave: Any
    interleave_shift: Any


class Batch(NamedTuple):
    """The tokens of one launch: where each one's row and position stand."""

    idx_mapping_ptr: Any
    query_start_loc_ptr: Any
    positions_ptr: Any
    replay_start_ptr: Any
    replay_len_ptr: Any
    replay_window: Any
    num_reqs: Any
    num_positions: Any
    num_expected: Any
    query_len_inverse: Any
    search_steps: Any


class Output(NamedTuple):
    """One group's slots, and how many programs map tokens and pad the rest."""

    slots_ptr: Any
    capacity: Any
    num_tiles: Any
    num_pad: Any


class Packet(NamedTuple):
    """Staged writes of this launch (staged.py); num_rows = 0: none."""

    ptr: Any
    num_rows: Any


class Choices(NamedTuple):
    """What a variant is compiled for; every field is a compile-time constant."""

    FLAT: Any
    POW2: Any
    SHARDED: Any
    RING: Any
    REPLAY: Any
    STAGED: Any
    NULLS: Any
    CHECKED: Any


class Group(NamedTuple):
    """What a tile of tokens must know of its group, from its line of the descriptor."""

    number: Any
    kind: Any
    column_shift: Any
    width: Any
    table_offset: Any
    column_size: Any
    virtual_size: Any
    virtual_shift: Any
    shards: Any
    shards_shift: Any
    rank: Any
    columns_per_block: Any
    cacheable: Any
    null_column: Any


class Gather(NamedTuple):
    """Whose rows a launch gathers, and the state of what was gathered before."""

    idx_mapping_ptr: Any
    num_computed_ptr: Any
    generations_ptr: Any
    state_ptr: Any
    num_reqs: Any
    num_entries: Any
    num_helpers: Any
    null_columns: Any


class Gathered(NamedTuple):
    """One group's gathered table."""

    ptr: Any
    stride: Any
    width: Any


class Entry(NamedTuple):
    """What a batch entry holds after this launch; `filled` columns, the first `nulled` of them 0.

    Columns from `start` on are written by this launch; the first staged id has the number
    `first_id`.
    """

    index: Any
    exists: Any
    row: Any
    filled: Any
    nulled: Any
    generation: Any
    start: Any
    first_id: Any


class Source(NamedTuple):
    """Where a group's columns come from, and which share of them this program copies."""

    table_ptr: Any
    width: Any
    ids_ptr: Any
    helper: Any
    num_helpers: Any


class CopyChoices(NamedTuple):
    """What gathering and writing programs are compiled for; sizes are those of plan.py."""

    ENTRIES: Any
    COLUMNS: Any
    STRETCH: Any
    STRETCH_COST: Any
    PART: Any
    RECORDS: Any
    POW2: Any
    WHOLE: Any
    CHECKED: Any
