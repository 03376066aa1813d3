"""Tests; `tests.workloads` and `tests.simulator` are shared with bench/."""
