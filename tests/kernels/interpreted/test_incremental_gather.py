"""The attacks on incremental gathering through interpreted kernels."""
# ruff: noqa: F401, F403

from tests.kernels.test_incremental_gather import *

from tests.kernels.interpreted.backends import make_tables  # isort: skip
