"""The one backend of this folder's tests that are written for any."""

from __future__ import annotations

import pytest

from tests.backends_under_test import MakeTables


@pytest.fixture
def make_tables() -> MakeTables:
    return MakeTables("cpu", "interpreter")
