"""The report of a recording, looked at in a browser: the slider is moved, the text is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fused_slots import ContextParallel, KVCacheGroup
from fused_slots.inspect.report import KeptFindings, build_report
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.schedule import Append, Schedule, ScheduleStep, load_recording
from fused_slots.reference import map_token
from tests.browser.webdriver import Browser, browser
from tests.recording.small_schedules import schedule, with_truth
from tests.recording.test_check import block_of_two_requests

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(name="chromium", scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(name="page")
def _page(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The browser; behind the test it must have had nothing to complain about."""
    chromium.media(prefers_color_scheme="light")
    yield chromium
    assert chromium.complaints() == []
    assert chromium.run("return performance.getEntriesByType('resource').length;") == 0


def show(page: Browser, folder: Path, recording: Schedule, hash: str = "", **choices: int) -> None:
    findings = KeptFindings.of(ScheduleCheck(recording))
    path = folder / "report.html"
    path.write_bytes(build_report(recording, findings, **choices).content)
    page.open(path.as_uri() + hash)


def pixel(page: Browser, x: int, y: int) -> list[int]:
    """Red, green, blue and alpha of a point of the table's picture."""
    picture = "document.getElementById('grid').getContext('2d')"
    script = f"return [...{picture}.getImageData(arguments[0], arguments[1], 1, 1).data];"
    return list(page.run(script, x, y))


def twice_owned(steps: list[ScheduleStep]) -> list[ScheduleStep]:
    """Step 1: the KV manager gives block 6 to both requests."""
    return [steps[0], with_truth(steps[1], 0, 0, [1, 6]), steps[2]]


def test_slider_and_keys_move_through_the_steps(page: Browser, tmp_path: Path) -> None:
    recording = load_recording("preemption")
    steps = list(recording)
    show(page, tmp_path, recording)
    assert page.text(".verdict") == "No finding"
    assert page.text("h2:has(#step-title)") == "Step 0"
    page.keys("#slider", *["ArrowRight"] * 7)
    assert page.text("h2:has(#step-title)") == "Step 7"
    expected = steps[7].request_ids.tolist()
    assert page.texts("#batch td:nth-child(1)") == [str(request) for request in expected]
    assert page.texts("#batch td:nth-child(2)") == [str(row) for row in steps[7].idx_mapping]
    page.keys("body", "PageDown", "ArrowLeft")
    assert page.text("#step-title") == "16"
    page.keys("body", "End")
    assert page.text("#step-title") == "399"
    page.click("#back")
    assert page.text("#step-title") == "398"
    page.keys("body", "Home", "e")
    first_event = next(index for index, step in enumerate(steps) if step.events)
    assert page.text("#step-title") == str(first_event)
    assert page.texts("#changes li")[0] == steps[first_event].events[0]
    assert page.run("return location.hash;").startswith(f"#step={first_event}&")


def test_tables_in_the_browser_are_those_of_the_recording(page: Browser, tmp_path: Path) -> None:
    """In any order of steps, so that going back and checkpoints are right too."""
    recording = load_recording("async_speculative")
    show(page, tmp_path, recording)
    wanted = [120, 121, 3, 260, 119, 399, 0, 50, 49]
    script = """
        return unpack().then((arrays) => {
          const recording = new Recording(arrays);
          return arguments[0].map((i) => {
            const { rows, held } = recording.at(i);
            return recording.entries(i).map((entry) => [entry, page.groups.map((_, g) => {
              const { ids, n } = held[g * R + entry.row];
              return [[...rows[g * R + entry.row]], [...ids.subarray(0, n)]];
            })]);
          });
        });"""
    answers = page.run(script, wanted)
    steps = list(recording)
    for index, entries in zip(wanted, answers, strict=True):
        step = steps[index]
        assert [entry["request"] for entry, _ in entries] == step.request_ids.tolist()
        for number, (entry, groups) in enumerate(entries):
            begin, end = step.query_start_loc[number : number + 2]
            assert (entry["row"], entry["count"]) == (step.idx_mapping[number], end - begin)
            assert entry["first"] == step.positions[begin]
            for g, (row, held) in enumerate(groups):
                truth = step.expected_blocks[g][number]
                assert held == truth.tolist(), (index, number, g)
                assert np.array_equal(np.array(row)[truth != 0], truth[truth != 0])


@pytest.mark.parametrize("context_parallel", [ContextParallel(), ContextParallel(4, 1, 2)])
def test_slots_are_those_of_the_reference(
    page: Browser, tmp_path: Path, context_parallel: ContextParallel
) -> None:
    recording = schedule()
    show(page, tmp_path, recording, context_parallel=context_parallel)
    rows, positions = [[], [5], [7, 9, 2]], list(range(150))
    script = """
        return page.groups.map((_, g) => arguments[0].map((row) => arguments[1].map(
          (position) => mapToken(g, Int32Array.from(row), position).slot)));"""
    answers = page.run(script, rows, positions)
    for group, of_group in zip(recording.groups, answers, strict=True):
        n = group.columns_per_block
        for row, slots in zip(rows, of_group, strict=True):
            columns = [block * n + part for block in row for part in range(n)]
            for position, slot in zip(positions, slots, strict=True):
                assert slot == map_token(group, columns, position, context_parallel).slot


def test_page_opens_at_the_first_finding_and_says_what_it_means(
    page: Browser, tmp_path: Path
) -> None:
    show(page, tmp_path, schedule(twice_owned))
    assert page.text(".verdict") == "2 findings, the first in step 1"
    assert page.text("#step-title") == "1"
    wrong, double = page.texts("#step-findings li")
    assert "column 1 is block 8, the KV manager says 6 (row 0: request 1)" in wrong
    assert "what belongs to somebody else" in wrong
    assert "block 6 is written by row 2 of group 0 (full) and by row 0" in double
    assert "Double ownership" in double
    assert page.run("return document.getElementById('block').value;") == "6"
    assert page.texts("#owners li") == ["request 1 in row 0", "request 0 in row 2"]
    page.click("#history")
    assert page.texts("#owners li") == [
        "steps 1: request 1 in row 0",
        "steps 1: request 0 in row 2",
    ]
    page.keys("body", "ArrowRight", "p")
    assert page.text("#step-title") == "1"
    page.click("#forward")
    page.click("a.step")
    assert page.text("#step-title") == "1"


def test_prefix_that_is_shared_is_no_fault(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, load_recording("prefix_hits"), "#step=120")
    assert page.text(".verdict") == "No finding"
    page.keys("#block", "1")
    owners = page.texts("#owners li")
    assert len(owners) > 3
    assert all(text.startswith("request ") for text in owners)
    assert page.texts("#step-findings li") == []


def test_one_request_and_its_slots(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, schedule(), "#step=1&group=0&request=1")
    assert page.texts("#slots td") == [
        *("full", "8 … 9", "8", "64 … 65", ""),
        *("sliding", "8 … 9", "9", "36 … 37", ""),
        *("state", "8 … 9", "10", "PAD", "state group: tokens have no slots"),
        *("ring", "8 … 9", "11", "44 … 45", "a slot of the ring"),
    ]
    assert page.text("#derivation").endswith("slot = 16 * 4 + 1 = 65")
    page.run("document.getElementById('position').value = '';")
    page.keys("#position", "40")
    assert "fault: the row has not filled" in page.text("#derivation")


def test_cell_under_the_pointer_is_described(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, schedule(), "#step=1&group=1&request=0")
    label, wide = 150, 46
    page.click("#grid", label + wide // 2, 18 + 11)
    assert page.text("#cell") == (
        "row 2, request 0, block 0 of 3: the table has block 2, the KV manager holds nothing "
        "(freed); held too by request 1"
    )
    page.click("#grid", label + wide // 2, 18 + 22 + 11)
    assert page.text("#cell").startswith("row 0, request 1, block 0 of 3: the table has block 2")


def test_text_of_a_recording_is_text_in_the_page(page: Browser, tmp_path: Path) -> None:
    small = schedule(lambda steps: [replace(steps[0], events=(HOSTILE,)), *steps[1:]])
    groups = (replace(small.groups[0], name=HOSTILE), *small.groups[1:])
    hostile = replace(small, name=HOSTILE, metadata={HOSTILE: HOSTILE}, groups=groups)
    show(page, tmp_path, hostile)
    assert page.text("h1") == HOSTILE
    assert page.texts("#changes li")[0] == HOSTILE
    assert page.texts("#groups button")[0] == HOSTILE
    assert page.run("return [document.title, document.images.length];") == [
        f"{HOSTILE}: block tables",
        0,
    ]


def test_part_of_a_long_recording_counts_as_the_whole_does(page: Browser, tmp_path: Path) -> None:
    recording = load_recording("chunked_prefill")
    steps = list(recording)
    show(page, tmp_path, recording, "#step=210", max_bytes=200_000, around=200)
    assert "of 400" in page.text(".left-out")
    assert page.text("#step-title") == "210"
    assert page.texts("#batch td:nth-child(1)") == list(map(str, steps[210].request_ids))
    page.keys("body", "Home")
    assert any("stood before this page begins" in text for text in page.texts("#changes li"))
    assert page.text("#step-title") == page.text("#of").split()[1]


def test_dark_light_and_paper(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, schedule(twice_owned))
    paper = "return getComputedStyle(document.body).backgroundColor;"
    light = page.run(paper), pixel(page, 150 + 30, 18 + 3)
    page.media(prefers_color_scheme="dark")
    dark = page.run(paper), pixel(page, 150 + 30, 18 + 3)
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(21, 24, 28)"
    assert light[1] != dark[1]
    page.media(type="print")
    hidden = "return getComputedStyle(document.getElementById('bar')).display;"
    assert page.run(hidden) == "none"
    cut = "getComputedStyle(element).overflow"
    cut = f"return [...document.querySelectorAll('.scroll')].map((element) => {cut});"
    assert set(page.run(cut)) == {"visible"}
    page.media()


def test_finding_is_red_in_the_table(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, schedule(twice_owned))
    red = [193, 18, 31, 255]
    assert pixel(page, 150 + 46 + 30, 18 + 3) == red
    assert pixel(page, 150 + 30, 18 + 3) != red


def test_block_with_two_owners_is_red_in_both_rows(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path, schedule(block_of_two_requests))
    assert len(page.texts("#step-findings li")) == 1, "the finding itself names one row"
    assert pixel(page, 150 + 46 + 30, 18 + 3) == [193, 18, 31, 255]
    assert pixel(page, 150 + 46 + 30, 18 + 22 + 3) == [193, 18, 31, 255]


def test_all_ranks_in_one_page(page: Browser, tmp_path: Path) -> None:
    """Each token has the slot that the reference gives it on its owner, which is named."""
    recording, dealt = schedule(), [ContextParallel(4, rank, 2) for rank in range(4)]
    show(page, tmp_path, recording, "#step=0", context_parallel=dealt[1], all_ranks=True)
    assert "all 4 ranks, tables of rank 1" in page.text(".facts")
    owners = [position // 2 % 4 for position in range(8)]
    expected = [
        map_token(recording.groups[0], [2, 3], p, dealt[o]).slot for p, o in enumerate(owners)
    ]
    assert page.texts("#slots tr:nth-child(n+2):nth-child(-n+5) td") == [
        text
        for owner in range(4)
        for text in (
            *("full", f"{2 * owner} … {2 * owner + 1}", "1"),
            *(f"{expected[2 * owner]} … {expected[2 * owner + 1]}", f"on rank {owner}"),
        )
    ]
    assert page.text("#derivation").endswith(f"slot = {expected[7]}: on rank 3")


def long_recording(steps: int, rows: int) -> Schedule:
    """Every row decodes from a position of its own; block ids tell row and column."""
    groups = tuple(KVCacheGroup(size, 64, name=f"of {size}") for size in (16, 32, 64, 128))
    ids = [
        [np.arange(64, dtype=np.int32) + 1 + 64 * (row + rows * g) for row in range(rows)]
        for g in range(4)
    ]

    def counts(step: int, row: int) -> list[int]:
        return [(7 * row + step) // group.block_size + 1 for group in groups]

    def one(step: int) -> ScheduleStep:
        appends = []
        for row in range(rows):
            now, before = counts(step, row), counts(step - 1, row) if step else [0] * 4
            if now != before:
                blocks = [ids[g][row][before[g] : now[g]].tolist() for g in range(4)]
                appends.append(Append(row, tuple(blocks), step == 0))
        batch = np.arange(rows, dtype=np.int32)
        starts = np.arange(rows + 1, dtype=np.int32)
        return ScheduleStep(
            *(tuple(appends), batch, batch, starts, 7 * np.arange(rows) + step, batch),
            tuple(
                tuple(ids[g][row][: counts(step, row)[g]] for row in range(rows)) for g in range(4)
            ),
        )

    return Schedule.from_steps(
        map(one, range(steps)),
        name="long",
        groups=groups,
        max_num_reqs=rows,
        max_num_batched_tokens=rows,
        num_blocks=1 + 4 * 64 * rows,
        metadata={},
    )


def test_long_recording_is_one_page_that_moves_to_any_step(page: Browser, tmp_path: Path) -> None:
    """A tenth of one with thousands of steps and hundreds of rows (figures in docs/report.md)."""
    recording = long_recording(800, 24)
    show(page, tmp_path, recording)
    assert (tmp_path / "report.html").stat().st_size < 1 << 20
    assert not page.run("return document.querySelectorAll('.left-out').length;")
    assert page.text(".verdict") == "No finding"
    for step in (799, 0, 413, 412):
        page.run("location.hash = arguments[0];", f"#step={step}&group=0&request=23")
        page.run("return new Promise((done) => setTimeout(done));")
        assert page.text("#step-title") == str(step)
        position = 7 * 23 + step
        column = position // 16
        assert page.texts("#slots tr:nth-child(2) td")[1:4] == [
            str(position),
            str(1 + 64 * 23 + column),
            str((1 + 64 * 23 + column) * 16 + position % 16),
        ]
    page.keys("#block", "".join(str(64 * 23 + 1 + 50)))
    page.click("#history")
    assert page.texts("#owners li") == ["steps 639 … 799: request 23 in row 23"]
