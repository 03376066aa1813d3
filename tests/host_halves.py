"""The two halves of staging, for tests that run once on each:

    @pytest.fixture(params=HALVES)
    def half(request):
        with staged_by(request.param): yield
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from unittest import mock

from fused_slots.host.rows import NATIVE

HALVES = ("python", "native") if NATIVE else ("python",)


def staged_by(half: str) -> AbstractContextManager[object]:
    """A context in which new managers stage in this half."""
    return mock.patch.dict(os.environ, {"FUSED_SLOTS_HOST": half})
