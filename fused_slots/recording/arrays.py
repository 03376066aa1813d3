"""The arrays of a schedule: their names, and the checks that decoding relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_slots.faults import BlockTableError
from fused_slots.groups import KVCacheGroup

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
AnyIntArray = npt.NDArray[Any]
"""int32 or int64."""

# Every array of a file: whether its second axis counts groups.
ARRAYS = {
    "step_entries": False,  # [steps] batch entries of a step
    "step_appends": False,  # [steps]
    "request_ids": False,  # [entries]
    "rows": False,  # [entries]
    "num_scheduled": False,  # [entries] tokens
    "num_computed": False,  # [entries] tokens
    "truth_blocks": True,  # [entries, groups] blocks that the KV manager holds
    "truth_edits": True,  # [entries, groups] edits since the row was last scheduled
    "edit_columns": False,  # [edits]
    "edit_blocks": False,  # [edits]
    "append_rows": False,  # [appends]
    "append_overwrite": False,  # [appends] 0 or 1
    "append_counts": True,  # [appends, groups]
    "append_blocks": False,  # [appended blocks], by append, then by group
}


class ScheduleError(BlockTableError):
    """A schedule that cannot be read: a damaged or foreign file, or inconsistent steps."""


class UnknownRecordingError(ScheduleError):
    """There is neither a file nor a shipped recording of that name."""


class ScheduleSizeError(ScheduleError):
    """A schedule file that asks for more memory than its reader allows."""


def ends(counts: Int32Array) -> Int64Array:
    """Where each count's items end when all of them lie in one flat array."""
    return np.cumsum(counts.reshape(-1), dtype=np.int64).reshape(counts.shape)


def validate(
    arrays: Mapping[str, Int32Array],
    *,
    groups: Sequence[KVCacheGroup],
    max_num_reqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
) -> None:
    """Check everything that decoding relies on, so that it can index without looking.

    Raises:
        ScheduleError: names the array, the first bad item, its group and what was allowed.
    """
    for array, values in arrays.items():
        if values.dtype != np.int32 or values.ndim != 1 + ARRAYS[array]:
            actual = f"{values.dtype}, {values.ndim}-D"
            raise ScheduleError(array, expected=f"int32, {1 + ARRAYS[array]}-D", actual=actual)
        check_below(array, values, 2**31)
    entries, appends = int(arrays["step_entries"].sum()), int(arrays["step_appends"].sum())
    edits, steps = int(arrays["truth_edits"].sum()), len(arrays["step_entries"])
    lengths = {
        "step_appends": steps,
        **dict.fromkeys(("request_ids", "rows", "num_scheduled", "num_computed"), entries),
        **dict.fromkeys(("truth_blocks", "truth_edits"), entries),
        **dict.fromkeys(("edit_columns", "edit_blocks"), edits),
        **dict.fromkeys(("append_rows", "append_overwrite", "append_counts"), appends),
        "append_blocks": int(arrays["append_counts"].sum()),
    }
    check_lengths(arrays, lengths)
    widths = np.array([group.max_num_blocks for group in groups])
    of_entries = np.broadcast_to(np.arange(len(groups)), arrays["truth_edits"].shape)
    of_edits = np.repeat(of_entries.reshape(-1), arrays["truth_edits"].reshape(-1))
    check_below("rows", arrays["rows"], max_num_reqs)
    check_below("append_rows", arrays["append_rows"], max_num_reqs)
    check_below("append_blocks", arrays["append_blocks"], num_blocks)
    check_below("edit_blocks", arrays["edit_blocks"], num_blocks)
    check_below("truth_blocks", arrays["truth_blocks"], widths + 1, groups, of_entries)
    check_below("edit_columns", arrays["edit_columns"], widths[of_edits], groups, of_edits)
    check_below("step_entries", arrays["step_entries"], max_num_reqs + 1)
    tokens_before = np.concatenate([[0], ends(arrays["num_scheduled"])])
    tokens = np.diff(tokens_before[np.concatenate([[0], ends(arrays["step_entries"])])])
    check_below("tokens of a step", tokens, max_num_batched_tokens + 1)


def describe(groups: Sequence[KVCacheGroup], g: int) -> str:
    """A group as findings and errors name it: its number and, when given, its name."""
    return f"group {g} ({groups[g].name})" if groups[g].name else f"group {g}"


def check_lengths(arrays: Mapping[str, Int32Array], lengths: Mapping[str, int]) -> None:
    """Refuse arrays that are not as long as the counts of others say.

    Raises:
        ScheduleError: names the first of them.
    """
    for array, length in lengths.items():
        if len(arrays[array]) != length:
            raise ScheduleError(array, expected=f"{length} items", actual=f"{len(arrays[array])}")


def check_below(
    array: str,
    values: npt.NDArray[Any],
    limit: Any,
    groups: Sequence[KVCacheGroup] = (),
    group_of: npt.NDArray[Any] | None = None,
) -> None:
    """Refuse a negative item, or one that is not below its limit.

    Raises:
        ScheduleError: names the first of them, and its group where `group_of` is given.
    """
    bad = np.flatnonzero(np.ravel((values < 0) | (values >= limit)))
    if len(bad):
        item = bad[0]
        allowed = np.broadcast_to(limit, values.shape).reshape(-1)[item]
        where = "" if group_of is None else f", {describe(groups, group_of.reshape(-1)[item])}"
        raise ScheduleError(
            array,
            expected=f"0 <= value < {allowed} at item {item}{where}",
            actual=str(values.reshape(-1)[item]),
        )
