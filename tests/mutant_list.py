"""The mutants, and the tests that must notice them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

from tests.kernels.mutant_list import KERNEL_MUTANTS, KERNEL_TESTS
from tests.vllm_mutant_list import V1_MUTANTS, V1_TESTS


@dataclass(frozen=True)
class Tests:
    """What runs against a set's mutants, in which environment, and whether it can run here."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    can_run: Callable[[], bool] = lambda: True


class Mutant(NamedTuple):
    """One change of one file; `old` stands there exactly once."""

    set: str
    name: str
    file: str
    old: str
    new: str


TESTS = {
    "host": Tests(
        (
            "tests/test_simulator.py::test_every_step_agrees_with_both_oracles[0]",
            "tests/test_simulator.py::test_guard_bands_round_every_buffer_keep_their_bytes",
            "tests/test_numeric_edges.py",
            "tests/test_properties.py",
            "tests/test_state_machine.py",
            "tests/test_context_parallel.py",
            "tests/test_arguments.py::test_batch_contents",
            "tests/test_row_writes.py::test_the_null_block_is_not_written_and_counted[cpu]",
            "--simulated-steps=8000",
            "-k",
            "not million and not beyond_int32",
        ),
        # The mutants of rows are in the half in Python.
        {"FUSED_SLOTS_HOST": "python"},
    ),
    "kernels": Tests(
        KERNEL_TESTS, {"TRITON_INTERPRET": "1"}, can_run=lambda: find_spec("triton") is not None
    ),
    "v1": Tests(V1_TESTS),
}

CPU = "fused_slots/backends/cpu.py"
ROWS = "fused_slots/host/python_staging.py"
STAGING = "fused_slots/host/staging.py"
LAYOUT = "fused_slots/layout.py"
ARGUMENTS = "fused_slots/arguments.py"
TABLES = "fused_slots/block_tables.py"
BASE_TABLES = "fused_slots/base_tables.py"
BETWEEN = "fused_slots/between_steps.py"
OUTPUTS = "fused_slots/outputs.py"
GROUPS = "fused_slots/groups.py"

_HOST = [
    # The mapping
    ("drop the pad of the tail", CPU, "out[:, num_tokens:] = PAD_SLOT_ID", "pass"),
    (
        "a tail of one token is not padded",
        CPU,
        "if num_tokens < out.shape[1]:",
        "if num_tokens + 1 < out.shape[1]:",
    ),
    (
        "as many tokens as requests are one each",
        CPU,
        "return starts.tobytes() == self._numbers[: num_reqs + 1].tobytes()",
        "return True",
    ),
    ("negative rows exist", CPU, "unsigned = rows.view(_UNSIGNED[rows.dtype])", "unsigned = rows"),
    ("pad from one token later", CPU, "out[:, num_tokens:] =", "out[:, num_tokens + 1 :] ="),
    (
        "drop the pad of state groups",
        CPU,
        "                out[g, :num_tokens] = PAD_SLOT_ID\n",
        "",
    ),
    ("dummies are row 0", CPU, "no_row = (rows < 0) | too_large", "no_row = too_large"),
    ("no rows are too large", CPU, "no_row = (rows < 0) | too_large", "no_row = rows < 0"),
    (
        "row limit + 1",
        CPU,
        "unsigned[unsigned.argmax()] < self.layout",
        "unsigned[unsigned.argmax()] <= self.layout",
    ),
    ("negative positions are position 0", CPU, "_union(no_row, negative)", "no_row"),
    ("position 0 is negative", CPU, "negative = positions < 0", "negative = positions <= 0"),
    ("replay pads every group", CPU, "if group.prefix_cacheable and tokens", "if tokens"),
    ("replay pads no group", CPU, "padded = _union(padded, tokens.replayed)", "pass"),
    ("replay window + 1", CPU, "(token_positions < end)", "(token_positions <= end)"),
    ("replay begins late", CPU, "(token_positions >= begin)", "(token_positions > begin)"),
    ("replay start 0 is a start", CPU, " * (begin != 0)]", "]"),
    ("replay_len ignored", CPU, "if step.replay_len is None:", "if True:"),
    ("the null block is written", CPU, "padded = _union(padded, null)", "pass"),
    ("null columns by the first", CPU, "block_ids // group.columns_per_block ==", "block_ids =="),
    ("every position is repeated", CPU, "repeated[order[1:]] = same", "repeated[:] = True"),
    (
        "rings are pages",
        CPU,
        "        if group.kind.is_paged:\n            column",
        "        if True:\n            column",
    ),
    (
        "ring of one slot less",
        GROUPS,
        "return positions * 0, positions % block_size",
        "return positions * 0, positions % max(block_size - 1, 1)",
    ),
    ("one column beyond the row", CPU, "column >= self._num_columns", "column > self._num_columns"),
    (
        "columns beyond the row are not padded",
        CPU,
        "            padded = _union(padded, missing)\n",
        "",
    ),
    (
        "faults of padded tokens count",
        CPU,
        "faulty = faulty & ~padded",
        "pass",
    ),
    (
        "a ring's fault has the page's code",
        CPU,
        "FaultCode.EMPTY_RING",
        "FaultCode.COLUMN_OUT_OF_ROW",
    ),
    (
        "row stride of another group",
        CPU,
        "tokens.rows * self.layout.widths[g]",
        "tokens.rows * self.layout.widths[0]",
    ),
    (
        "int32 product",
        CPU,
        "np.multiply(block_ids, group.tokens_per_column, dtype=out.dtype, out=out)",
        "out[:] = block_ids * np.int32(group.tokens_per_column)",
    ),
    (
        "float32 product",
        CPU,
        "np.multiply(block_ids, group.tokens_per_column, dtype=out.dtype, out=out)",
        "out[:] = (block_ids.astype(np.float32) * group.tokens_per_column).astype(out.dtype)",
    ),
    (
        "block size for kernel block size",
        CPU,
        "np.multiply(block_ids, group.tokens_per_column,",
        "np.multiply(block_ids, group.block_size,",
    ),
    ("drop the offset", CPU, "        out += offset.astype(out.dtype, copy=False)\n", ""),
    ("drop the pads", CPU, "            out[padded] = PAD_SLOT_ID\n", "            pass\n"),
    ("other ranks' tokens are mapped", CPU, "_any_or_none(owner != rank)", "None"),
    ("swap rank", CPU, "_any_or_none(owner != rank)", "_any_or_none(owner != size - 1 - rank)"),
    ("interleave of 1", CPU, "_divmod(virtual_offset, interleave)", "_divmod(virtual_offset, 1)"),
    ("drop the place within a stripe", CPU, "stripe * interleave + within", "stripe * interleave"),
    (
        "replicated groups are sharded",
        GROUPS,
        "if group.dcp_sharded else (1, 0)",
        "if True else (1, 0)",
    ),
    (
        "virtual block is one column",
        CPU,
        "column += virtual_block * group.columns_per_block",
        "column += virtual_block",
    ),
    ("a power of two one too large", CPU, "(divisor.bit_length() - 1)", "divisor.bit_length()"),
    ("mask of the power of two", CPU, "values & (divisor - 1)", "values & divisor"),
    (
        "a position cut to int32",
        CPU,
        "token_positions = step.positions.numpy()[:num_tokens]",
        "token_positions = step.positions.numpy()[:num_tokens].astype(np.int32).astype(np.int64)",
    ),
    (
        "count one fault less",
        CPU,
        "int(np.count_nonzero(faulty))",
        "max(int(np.count_nonzero(faulty)) - 1, 0)",
    ),
    ("a fault's token is one too far", CPU, "(t, int(positions[t]))", "(t + 1, int(positions[t]))"),
    ("faults stay after they are taken", CPU, "        self._fault_counts[:] = 0\n", ""),
    (
        "details stay after they are taken",
        CPU,
        "self._fault_details, []\n",
        "self._fault_details, self._fault_details\n",
    ),
    # Gathering
    (
        "columns beyond a row are gathered",
        CPU,
        "            live[:, uniform:] *= self._numbers[uniform:filled] < lengths[:, None]\n",
        "            pass\n",
    ),
    (
        "the last column is not gathered",
        CPU,
        "self._numbers[uniform:filled] < lengths",
        "self._numbers[uniform:filled] + 1 < lengths",
    ),
    (
        "dummies gather row 0",
        CPU,
        "                lengths[~exists] = 0\n",
        "                pass\n",
    ),
    (
        "rows out of range gather uncounted",
        CPU,
        "            self._count(FaultCode.ROW_OUT_OF_RANGE, g, too_large, rows)\n",
        "            pass\n",
    ),
    (
        "rows of padding keep their cells",
        CPU,
        "                table[len(rows) : end, : self._dirty_columns[g]] = 0\n",
        "",
    ),
    (
        "rows of padding in out keep theirs",
        CPU,
        "                table[len(rows) : num_reqs_padded] = 0\n",
        "",
    ),
    (
        "only padding up to num_reqs_padded",
        CPU,
        "end = max(num_reqs_padded, self._dirty_rows)",
        "end = num_reqs_padded",
    ),
    ("old columns stay", CPU, "        table[: len(rows), filled:dirty_columns] = 0\n", ""),
    ("dirty columns forgotten", CPU, "int(lengths.max(initial=0))", "0"),
    (
        "dirty rows forgotten",
        CPU,
        "            self._dirty_rows = len(rows)\n",
        "            self._dirty_rows = 0\n",
    ),
    (
        "dummy rows forgotten",
        CPU,
        "        self._dirty_rows = num_reqs\n",
        "        self._dirty_rows = 0\n",
    ),
    (
        "dummy columns forgotten",
        CPU,
        "        self._dirty_columns = list(self.layout.widths)\n",
        "        pass\n",
    ),
    ("dummy rows not zeroed", CPU, "            table[:end] = 0\n", "            pass\n"),
    (
        "window by batch",
        CPU,
        "computed.numpy()[safe_rows]",
        "computed.numpy()[: len(rows)]",
    ),
    (
        "window one token short",
        CPU,
        "- group.sliding_window_reach, 0)",
        "- group.sliding_window_reach + 1, 0)",
    ),
    ("window ignored", CPU, "if computed is None or not group.sliding_window_reach:", "if True:"),
    (
        "window under context parallelism",
        CPU,
        "if self.layout.context_parallel.size > 1:",
        "if False:",
    ),
    (
        "window in allocation blocks",
        CPU,
        "first_readable // group.tokens_per_column",
        "first_readable // group.block_size",
    ),
    (
        "window's last column",
        CPU,
        "self._numbers[:nulled] >= below",
        "self._numbers[:nulled] > below",
    ),
    # The step
    (
        "step does not apply",
        CPU,
        "            self.apply_writes(step.staged)\n",
        "            pass\n",
    ),
    (
        "lengths not written",
        CPU,
        "        self._num_columns[:, writes.rows] = writes.filled.T\n",
        "",
    ),
    (
        "step loses replay",
        TABLES,
        "            replay_start,\n            replay_len,\n            self._staged(",
        "            None,\n            None,\n            self._staged(",
    ),
    (
        "step loses the window",
        TABLES,
        "            num_computed_tokens,\n            replay_start,\n            replay_len,\n",
        "            None,\n            replay_start,\n            replay_len,\n",
    ),
    (
        "a step is two launches",
        BASE_TABLES,
        "            self._backend.step(step)\n            self.launches += 1\n",
        "            self._backend.step(step)\n            self.launches += 2\n",
    ),
    (
        "staged writes applied again",
        BASE_TABLES,
        "            step.staged.clear()\n",
        "            pass\n",
    ),
    # Rows
    (
        "overwrite ignored",
        ROWS,
        "            self._start_anew(req_index)\n",
        "            pass\n",
    ),
    ("overwrite appends", ROWS, "begin = 0 if overwrite else", "begin = 0 if False else"),
    ("always overwrite", ROWS, "begin = 0 if overwrite else", "begin = 0 if True else"),
    (
        "overwrite with nothing ignored",
        ROWS,
        "        if overwrite:\n",
        "        if overwrite and pieces:\n",
    ),
    ("capacity + 1", ROWS, "if end > self._widths[g]:", "if end > self._widths[g] + 1:"),
    ("capacity in blocks", ROWS, "len(group_ids) * self._columns_per_block[g]", "len(group_ids)"),
    (
        "redirection ignored",
        "fused_slots/host/block_ids.py",
        "[NULL_BLOCK_ID if _is_int(id_) and",
        "[id_ if _is_int(id_) and",
    ),
    (
        "ids up to the pool's size",
        ROWS,
        "largest > self._max_block_ids[g]:",
        "largest > self._max_block_ids[g] + 1:",
    ),
    ("negative ids accepted", ROWS, "smallest < 0 or largest", "largest"),
    ("largest id forgotten", ROWS, "largest_ids[g] = largest\n", "pass\n"),
    (
        "overwrites do not void",
        ROWS,
        "            self._records[req_index] = [[] for _ in self._widths]\n",
        "            pass\n",
    ),
    (
        "overwrites void other rows",
        ROWS,
        "            self._records[req_index] = [[] for _ in self._widths]\n",
        "            self._records = {row: [[] for _ in self._widths] for row in self._records}\n",
    ),
    (
        "split in one column",
        STAGING,
        "_ranges(block_ids * per_block, per_block)",
        "_ranges(block_ids, per_block)",
    ),
    (
        "split by the first group's columns",
        STAGING,
        "np.repeat(per_record, counts.ravel() // per_record)",
        "np.repeat(per_record * 0 + n[0], counts.ravel() // per_record)",
    ),
    (
        "records begin where the first one does",
        ROWS,
        "offsets=(np.cumsum(counts) - counts.ravel())",
        "offsets=(np.cumsum(counts) * 0)",
    ),
    (
        "staged ids in another order",
        ROWS,
        "record[g].extend(group_ids)",
        "record[g][:0] = group_ids",
    ),
    (
        "rows start at column 0",
        STAGING,
        "return self.filled - self.counts",
        "return self.filled * 0",
    ),
    (
        "row stride of the arena + 1",
        STAGING,
        "self.rows[:, None] * widths",
        "self.rows[:, None] * (widths + 1)",
    ),
    # Limits and arguments
    (
        "column limit one too high",
        LAYOUT,
        "(INT32_MAX - (n - 1)) // n",
        "(INT32_MAX - (n - 1)) // n + 1",
    ),
    (
        "slot limit one too low",
        LAYOUT,
        "(INT32_MAX + 1) // group.block_size - 1",
        "(INT32_MAX + 1) // group.block_size - 2",
    ),
    (
        "slot limit one too high",
        LAYOUT,
        "(INT32_MAX + 1) // group.block_size - 1",
        "(INT32_MAX + 1) // group.block_size",
    ),
    ("pool limit one too high", LAYOUT, "bounds.append((pool - 1,", "bounds.append((pool,"),
    (
        "int32 out always accepted",
        OUTPUTS,
        "if group.maps_slots and last_slot > INT32_MAX:",
        "if False:",
    ),
    (
        "int32 out one block late",
        OUTPUTS,
        "(largest_ids[g] + 1) * group.block_size - 1",
        "largest_ids[g] * group.block_size - 1",
    ),
    (
        "batch over the capacity accepted",
        ARGUMENTS,
        "    if num_tokens > capacity:",
        "    if num_tokens > capacity + 9:",
    ),
    ("rows not aligned", GROUPS, "multiple = token_alignment // gcd", "multiple = 1 // gcd"),
    ("dummy slots not PAD", BETWEEN, "        self.slot_mappings.fill_(PAD_SLOT_ID)\n", ""),
    (
        "drafts into slot_mappings",
        TABLES,
        "self._backend.draft_slot_mappings if out is None",
        "self.slot_mappings if out is None",
    ),
]

MUTANTS = [Mutant("host", *mutant) for mutant in _HOST]
MUTANTS += [Mutant("kernels", *mutant) for mutant in KERNEL_MUTANTS]
MUTANTS += [Mutant("v1", *mutant) for mutant in V1_MUTANTS]
