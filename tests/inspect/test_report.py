"""The page of a recording as it is written; tests/browser looks at it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest

from fused_slots.inspect.report import MAX_FINDINGS, KeptFindings, build_report
from fused_slots.recording.arrays import ScheduleSizeError
from fused_slots.recording.check import Finding, FindingKind, ScheduleCheck
from fused_slots.recording.schedule import Schedule, load_recording
from tests.recording.small_schedules import schedule, steps

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;@@script@@\ud800\u202e"


def page_of(recording: Schedule, **choices: int) -> str:
    findings = KeptFindings.of(ScheduleCheck(recording))
    return build_report(recording, findings, **choices).content.decode()


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def many_steps(count: int) -> Schedule:
    """The small schedule over and over."""
    small = schedule()
    return Schedule.from_steps(
        steps() * count,
        **{
            name: getattr(small, name)
            for name in ("name", "groups", "max_num_reqs", "max_num_batched_tokens", "num_blocks")
        },
        metadata={},
    )


def test_text_of_a_recording_is_escaped_wherever_it_stands() -> None:
    small = schedule(lambda steps: [replace(steps[0], events=(HOSTILE,)), *steps[1:]])
    groups = (replace(small.groups[0], name=HOSTILE), *small.groups[1:])
    hostile = replace(small, name=HOSTILE, metadata={HOSTILE: HOSTILE}, groups=groups)
    kept = KeptFindings.of([Finding(FindingKind.NO_BLOCK, 0, HOSTILE)])
    page = build_report(hostile, kept).content.decode()
    assert "<img" not in page
    assert page.count("</script>") == 3, "data, arrays and script; nothing of the recording"
    assert data_of(page)["groups"][0]["name"] == HOSTILE
    assert page.count("class View") == 1, "a marker in a name is no marker"


def test_page_loads_nothing_and_runs_its_own_script_alone() -> None:
    page = page_of(schedule())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    for element, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy[1]
    text = re.sub(r'(id="page-arrays">)[A-Za-z0-9+/=]*', r"\1", page)  # may hold any letters
    assert not re.search(r"https?:|//[a-z]|url\(|@import|innerHTML|eval\(", text)


def test_page_of_a_long_recording_is_bounded_and_says_what_it_leaves_out() -> None:
    recording = many_steps(600)
    page = page_of(recording, max_bytes=40_000)
    assert len(page) < 110_000
    first, last = map(int, re.findall(r"holds steps (\d+) to (\d+) of 1,800", page)[0])
    assert last == 1799, "without a finding the last steps are kept"
    assert data_of(page)["first"] == first
    around = page_of(recording, max_bytes=40_000, around=700)
    first, last = map(int, re.findall(r"holds steps (\d+) to (\d+) of 1,800", around)[0])
    assert 0 < first < 700 < last < 1799
    assert 2 < (700 - first) / (last - 700) < 4, "most of the room is for what led there"


def test_first_finding_is_kept_where_not_all_steps_are() -> None:
    recording = many_steps(300)
    kept = KeptFindings.of(Finding(FindingKind.NO_BLOCK, step, "x") for step in (400, 880))
    page = build_report(recording, kept, max_bytes=40_000)
    assert page.first < 400 < page.last < 880
    document = data_of(page.content.decode())
    assert [finding["step"] for finding in document["findings"]] == [400]
    assert "2 findings, the first in step 400" in page.content.decode()


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ScheduleSizeError, match="Raise --page-mib"):
        page_of(load_recording("preemption"), max_bytes=2000)


def test_findings_are_counted_beyond_those_that_are_listed() -> None:
    kept = KeptFindings.of(
        Finding(FindingKind.NO_BLOCK, step, "x") for step in range(200) for _ in range(30)
    )
    assert kept.count == 6000
    assert len(kept.listed) == MAX_FINDINGS
    assert kept.listed[-1].step == 49, "20 of each step, so that more steps are listed"
    assert {kept.by_step[step] for step in range(200)} == {30}
    page = build_report(schedule(), kept).content.decode()
    assert "5,000 more are not listed" in page


def test_long_metadata_are_cut() -> None:
    page = page_of(replace(schedule(), metadata={"log": "y" * 5000}))
    assert f"{'y' * 2000} ..." in page
    assert "y" * 2001 not in page


def test_recording_without_steps_has_a_page() -> None:
    assert "No finding" in page_of(schedule(lambda _: []))
