"""The explain command."""

from __future__ import annotations

import pytest

from fused_slots.cli import main
from tests.cli.calls import run_json


@pytest.mark.parametrize(
    ("options", "slot", "outcome", "status"),
    [
        ("20 --block-size 32 --kernel-block-size 16 --blocks 3", 116, "paged", 0),
        ("300 --block-size 640 --kernel-block-size 128 --blocks 3", 2220, "paged", 0),
        ("16 --block-size 16 --blocks 5", -1, "column_out_of_row", 1),
        ("8192 --block-size 4 --circular --blocks 7", 28, "ring", 0),
        ("0 --block-size 4 --circular", -1, "empty_ring", 1),
        ("5 --block-size 64 --mode none --blocks 9", -1, "state_group", 0),
        ("3 --block-size 16 --blocks 0", 3, "paged", 0),
        ("3 --block-size 16 --blocks 0 --null-block-id 0", -1, "null_block", 1),
        ("5 --block-size 16 --blocks 5 --dummy", -1, "dummy", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2 --replicated", 97, "paged", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2", -1, "other_rank", 0),
        ("17 --block-size 16 --blocks 4,6 --cp-size 2 --cp-rank 1", 72, "paged", 0),
        ("4 --block-size 4 --blocks 3,5 --replay-window 4 --replay-start 4", -1, "replayed", 0),
        (
            "4 --block-size 4 --blocks 0,6 --replay-window 4 --replay-start 4 "
            "--not-prefix-cacheable",
            24,
            "paged",
            0,
        ),
    ],
)
def test_explain_derives_the_slot(
    options: str, slot: int, outcome: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, document = run_json(capsys, "explain", *options.split())
    (token,) = document["tokens"]
    assert (found, token["slot"], token["outcome"]) == (status, slot, outcome)
    assert token["derivation"][-1].startswith(f"slot = {slot}")


def test_explain_prints_one_derivation_a_position(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "3", "20", "--block-size", "16", "--blocks", "5,9"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "slot = 5 * 16 + 3 = 83" in first
    assert "slot = 9 * 16 + 4 = 148" in second
