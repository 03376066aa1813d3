"""Incremental gathering of long rows through interpreted kernels."""
# ruff: noqa: F401, F403

from tests.kernels.test_long_rows import *

from tests.kernels.interpreted.backends import make_tables  # isort: skip
