"""Schedule files for the commands to read: one that is right, one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.small_schedules import schedule, with_truth


@pytest.fixture(name="good_file")
def _good_file(tmp_path: Path) -> Path:
    schedule().save(tmp_path / "good.npz.xz")
    return tmp_path / "good.npz.xz"


@pytest.fixture(name="bad_file")
def _bad_file(tmp_path: Path) -> Path:
    spoiled = schedule(lambda steps: [with_truth(steps[0], 0, 0, [20]), *steps[1:]])
    spoiled.save(tmp_path / "bad.npz.xz")
    return tmp_path / "bad.npz.xz"
