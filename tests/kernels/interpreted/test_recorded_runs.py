"""Recordings and counters of interpreted kernels: the tests of every backend, run here."""

from __future__ import annotations

from tests.recording.test_flight import test_a_run_of_any_backend_replays_on_any_other
from tests.test_stats import test_counts_of_a_short_life

__all__ = ["test_a_run_of_any_backend_replays_on_any_other", "test_counts_of_a_short_life"]
