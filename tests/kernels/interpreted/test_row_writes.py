"""Rows cleared, cut and rewritten, null blocks and replay lengths, through interpreted kernels."""
# ruff: noqa: F401, F403

from tests.test_row_writes import *

from tests.kernels.interpreted.backends import make_tables  # isort: skip
