"""Files of results: what is no JSON, is too long or too deep is an error in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fused_slots.cli.json_file import ResultError, read_json

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "ä"], "b": {}}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a file of JSON; got JSONDecodeError"),
        (b"\xff\xfe\xff", "expected a file of JSON; got UnicodeDecodeError"),
        (b"[" * 100_000, "expected a file of JSON; got RecursionError"),
        (b"9" * 10_000, "expected a file of JSON; got ValueError"),
        (b" " * 2_000_001, "expected at most 2,000,000 bytes; got more. .* raise max_bytes"),
    ],
    ids=["empty", "no text", "nested", "digits", "long"],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ResultError, match=rf"a\.json: {message}"):
        read_json(tmp_path / "a.json", max_bytes=2_000_000)


def test_an_endless_file_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(ResultError, match="at most 1,000 bytes"):
        read_json("/dev/zero", max_bytes=1000)


def test_whatever_is_changed_in_a_file_is_read_or_refused(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "a.json"
    content = (RESULTS / "cuda_plans.json").read_bytes()
    refused = 0
    for _ in range(500):
        changed = bytearray(content)
        for at in random.integers(len(changed), size=3).tolist():
            changed[at : at + int(random.integers(4))] = random.bytes(int(random.integers(3)))
        path.write_bytes(changed)
        try:
            read_json(path)
        except ResultError:
            refused += 1
    assert 0 < refused <= 500
