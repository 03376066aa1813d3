"""Every known class of fault, with literal values, through interpreted kernels."""
# ruff: noqa: F401, F403

from tests.test_fault_classes import *

from tests.kernels.interpreted.backends import make_tables  # isort: skip
