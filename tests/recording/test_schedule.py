"""The schedule format: what goes in comes out, and what is not a schedule is refused by name."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fused_slots.faults import BlockTableError
from fused_slots.groups import KVCacheGroup, SlotMappingMode
from fused_slots.recording.schedule import (
    Append,
    Schedule,
    ScheduleError,
    ScheduleStep,
    load_schedule,
)

GROUPS = (
    KVCacheGroup(block_size=16, max_num_blocks=8, name="full"),
    KVCacheGroup(block_size=16, max_num_blocks=8, kernel_block_size=8, sliding_window_reach=15),
    KVCacheGroup(block_size=128, max_num_blocks=2, slot_mapping_mode=SlotMappingMode.NONE),
    KVCacheGroup(block_size=4, max_num_blocks=1, circular=True, prefix_cacheable=False),
)
SIZES = {"max_num_reqs": 4, "max_num_batched_tokens": 64, "num_blocks": 100}


def make_step(
    entries: list[tuple[int, int, int, int]],
    appends: tuple[Append, ...] = (),
    held: list[tuple[list[int], ...]] | None = None,
    events: tuple[str, ...] = (),
) -> ScheduleStep:
    """Entries are (request, row, computed tokens, scheduled tokens); held is per entry."""
    held = held or [([1], [2], [3], [4])] * len(entries)
    computed = np.zeros(SIZES["max_num_reqs"], np.int32)
    for _, row, num_computed, _ in entries:
        computed[row] = num_computed
    return ScheduleStep(
        appends=appends,
        request_ids=np.array([entry[0] for entry in entries], np.int32),
        idx_mapping=np.array([entry[1] for entry in entries], np.int32),
        query_start_loc=np.cumsum([0, *(entry[3] for entry in entries)], dtype=np.int32),
        positions=np.concatenate(
            [np.arange(0), *(np.arange(start, start + n) for _, _, start, n in entries)]
        ).astype(np.int64),
        num_computed_tokens=computed,
        expected_blocks=tuple(
            tuple(np.array(blocks[g], np.int32) for blocks in held) for g in range(len(GROUPS))
        ),
        events=events,
    )


STEPS = (
    make_step(
        [(7, 3, 0, 20), (8, 0, 0, 5)],
        (
            Append(3, ([11, 12], [13, 14], [15], [16]), overwrite=True),
            Append(0, ([21], [22], [23], [24]), overwrite=True),
        ),
        [([11, 12], [13, 14], [15], [16]), ([21], [22], [23], [24])],
    ),
    make_step([], events=("preempted 8",)),
    make_step(
        [(7, 3, 20, 13)],
        (Append(3, ([17], [18], [], []), overwrite=False),),
        [([11, 12, 17], [0, 14, 18], [15], [16])],
    ),
    make_step(
        [(8, 3, 16, 1), (9, 1, 0, 64 - 1)],
        (
            Append(3, ([21, 31], [0, 32], [33], [34]), overwrite=True),
            Append(1, ([41] * 4, [42] * 4, [43], [44]), overwrite=True),
        ),
        [([21, 31], [0, 32], [33], [34]), ([41] * 4, [42] * 4, [43], [44])],
        ("finished 7", "resumed 8", "prefix hit 16 of 8"),
    ),
)


def make_schedule(steps: tuple[ScheduleStep, ...] = STEPS) -> Schedule:
    return Schedule.from_steps(
        steps, name="made by hand", groups=GROUPS, metadata={"seed": 1}, **SIZES
    )


def assert_same_step(actual: ScheduleStep, expected: ScheduleStep) -> None:
    assert actual.appends == expected.appends
    assert actual.events == expected.events
    for field in ("request_ids", "idx_mapping", "query_start_loc", "positions"):
        got, want = getattr(actual, field), getattr(expected, field)
        assert got.dtype == want.dtype, field
        assert got.tolist() == want.tolist(), field
    rows = expected.idx_mapping
    assert actual.num_computed_tokens[rows].tolist() == expected.num_computed_tokens[rows].tolist()
    assert len(actual.expected_blocks) == len(GROUPS)
    for got_group, want_group in zip(actual.expected_blocks, expected.expected_blocks, strict=True):
        assert [got.tolist() for got in got_group] == [want.tolist() for want in want_group]


def test_a_saved_schedule_loads_with_equal_steps_and_sizes(tmp_path: Path) -> None:
    make_schedule().save(tmp_path / "a.npz.xz")
    loaded = load_schedule(tmp_path / "a.npz.xz")
    assert len(loaded) == len(STEPS)
    for actual, expected in zip(loaded, STEPS, strict=True):
        assert_same_step(actual, expected)
    assert loaded.groups == GROUPS
    assert loaded.name == "made by hand"
    assert loaded.metadata == {"seed": 1}
    assert {size: getattr(loaded, size) for size in SIZES} == SIZES


def test_equal_schedules_give_equal_bytes(tmp_path: Path) -> None:
    make_schedule().save(tmp_path / "a")
    make_schedule(tuple(make_schedule())).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_step_by_index_is_the_step_of_the_iteration() -> None:
    schedule = make_schedule()
    for index in (*range(len(STEPS)), -1):
        assert_same_step(schedule[index], STEPS[index])
    with pytest.raises(IndexError):
        schedule[len(STEPS)]


def test_a_schedule_without_steps_is_empty(tmp_path: Path) -> None:
    make_schedule(()).save(tmp_path / "a")
    assert list(load_schedule(tmp_path / "a")) == []


def test_writing_into_a_step_changes_no_other_step() -> None:
    schedule = make_schedule()
    for step in schedule:
        step.idx_mapping[:] = 2
        step.positions[:] = -1
        step.num_computed_tokens[:] = -1
        for group in step.expected_blocks:
            for blocks in group:
                blocks[:] = 77
    for actual, expected in zip(schedule, STEPS, strict=True):
        assert_same_step(actual, expected)


def test_rows_outside_the_batch_keep_their_last_number_of_computed_tokens() -> None:
    last = list(make_schedule())[-1]
    assert last.num_computed_tokens.tolist() == [0, 0, 0, 16]
    assert list(make_schedule())[2].num_computed_tokens.tolist() == [0, 0, 0, 20]


def wrong_row(step: ScheduleStep) -> ScheduleStep:
    return replace(step, idx_mapping=step.idx_mapping + 4)


def wrong_append_row(step: ScheduleStep) -> ScheduleStep:
    return replace(step, appends=(Append(4, ([], [], [], []), overwrite=False),))


def negative_append_row(step: ScheduleStep) -> ScheduleStep:
    return replace(step, appends=(Append(-1, ([], [], [], []), overwrite=False),))


def wrong_append_block(step: ScheduleStep) -> ScheduleStep:
    return replace(step, appends=(Append(0, ([100], [], [], []), overwrite=False),))


def huge_append_block(step: ScheduleStep) -> ScheduleStep:
    return replace(step, appends=(Append(0, ([2**31], [], [], []), overwrite=False),))


def wrong_held_block(step: ScheduleStep) -> ScheduleStep:
    held = [([1], [2], [3], [100])] * len(step.idx_mapping)
    return replace(step, expected_blocks=make_step([(0, 0, 0, 1)] * 2, (), held).expected_blocks)


def too_many_held_blocks(step: ScheduleStep) -> ScheduleStep:
    held = [([1], [2], [3], [4, 5])] * len(step.idx_mapping)
    return replace(step, expected_blocks=make_step([(0, 0, 0, 1)] * 2, (), held).expected_blocks)


def a_group_less(step: ScheduleStep) -> ScheduleStep:
    return replace(step, expected_blocks=step.expected_blocks[:-1])


def too_many_tokens(step: ScheduleStep) -> ScheduleStep:
    return make_step([(7, 3, 0, 60), (8, 0, 0, 5)])


def too_many_entries(step: ScheduleStep) -> ScheduleStep:
    return make_step([(7, 3, 0, 1)] * 5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_row, "step 2.*out of bounds"),
        (wrong_append_row, "append_rows: expected 0 <= value < 4 .*got 4"),
        (negative_append_row, "append_rows: expected 0 <= value .*got -1"),
        (wrong_append_block, "append_blocks: expected 0 <= value < 100 .*got 100"),
        (huge_append_block, "step .*out of bounds"),
        (wrong_held_block, "edit_blocks: expected 0 <= value < 100 .*got 100"),
        (too_many_held_blocks, "step 2.*"),
        (a_group_less, "step 2.*"),
        (too_many_tokens, "tokens of a step: expected 0 <= value < 65 .*got 65"),
        (too_many_entries, "step_entries: expected 0 <= value < 5 .*got 5"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(
    spoil: Callable[[ScheduleStep], ScheduleStep], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule((STEPS[0], STEPS[1], spoil(STEPS[0]), STEPS[2]))


def contents(path: Path) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        return dict(file)


def write(path: Path, arrays: dict[str, np.ndarray], **header: object) -> None:
    text = json.loads(arrays["header"].tobytes())
    text.update(header)
    arrays["header"] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(lzma.compress(buffer.getvalue()))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.npz.xz"
    make_schedule().save(path)
    return path


def test_a_file_cut_short_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in range(0, len(whole), 37):
        saved.write_bytes(whole[:length])
        with pytest.raises(ScheduleError, match=r"saved\.npz\.xz: expected a complete"):
            load_schedule(saved)


def test_a_file_with_a_changed_byte_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for at in range(0, len(whole), 41):
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(ScheduleError, match=r"saved\.npz\.xz"):
            load_schedule(saved)


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"not a schedule",
        lzma.compress(b"not an archive"),
        lzma.compress(json.dumps({"format": "fused_slots schedule"}).encode()),
    ],
)
def test_a_foreign_file_is_refused(saved: Path, foreign: bytes) -> None:
    saved.write_bytes(foreign)
    with pytest.raises(ScheduleError, match=r"saved\.npz\.xz: expected a complete"):
        load_schedule(saved)


def test_a_bare_array_is_refused(saved: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    saved.write_bytes(lzma.compress(buffer.getvalue()))
    with pytest.raises(ScheduleError, match=r"saved\.npz\.xz: expected a complete"):
        load_schedule(saved)


def test_pickled_content_is_never_unpickled(saved: Path) -> None:
    arrays = contents(saved)
    arrays["rows"] = np.array([{"an": "object"}], dtype=object)
    write(saved, arrays)
    with pytest.raises(ScheduleError, match="no flat int32"):
        load_schedule(saved)


def test_another_version_is_refused_by_number(saved: Path) -> None:
    write(saved, contents(saved), version=4)
    with pytest.raises(ScheduleError, match=r"version 1 or 2 or 3; got .* version 4"):
        load_schedule(saved)


@pytest.mark.parametrize(
    "header",
    [
        {"groups": []},
        {"groups": None},
        {"groups": [{"block_size": 16}]},
        {"events": [["x", []]]},
        {"max_num_reqs": "four"},
        {"max_num_reqs": 3},
        {"num_blocks": 40},
        {"max_num_batched_tokens": 63},
        {"unknown": 1},
    ],
)
def test_a_header_that_does_not_fit_is_refused(saved: Path, header: dict[str, object]) -> None:
    write(saved, contents(saved), **header)
    with pytest.raises(ScheduleError, match=r"saved\.npz\.xz"):
        load_schedule(saved)


def test_a_missing_or_damaged_array_is_refused_by_name(saved: Path) -> None:
    whole = contents(saved)
    for array in [name for name in whole if name != "header"]:
        for damaged in (None, whole[array][:-1], whole[array].astype(np.int64), whole[array] - 99):
            arrays = {name: values for name, values in whole.items() if name != array}
            if damaged is not None:
                arrays[array] = damaged
            write(saved, arrays)
            with pytest.raises(ScheduleError, match=r"saved\.npz\.xz"):
                load_schedule(saved)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("rows", 4),
        ("append_rows", 4),
        ("append_blocks", 100),
        ("edit_blocks", 100),
        ("edit_columns", 8),
        ("truth_blocks", 9),
    ],
)
def test_a_stored_value_out_of_range_is_refused_by_array(
    saved: Path, array: str, value: int
) -> None:
    arrays = contents(saved)
    arrays[array][0] = value
    write(saved, arrays)
    group = r", group 0 \(full\)" if array in ("edit_columns", "truth_blocks") else ""
    where = f"at item 0{group}; got {value}"
    with pytest.raises(ScheduleError, match=rf"{array}: expected 0 <= value < {value} {where}"):
        load_schedule(saved)


def test_schedule_errors_are_block_table_errors() -> None:
    assert issubclass(ScheduleError, BlockTableError)
