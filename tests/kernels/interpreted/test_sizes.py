"""Sizes in every kind of int, through interpreted kernels and the plans that are made of sizes."""
# ruff: noqa: F401

from tests.test_bad_input import test_sizes_in_every_kind_of_int

from tests.kernels.interpreted.backends import make_tables  # isort: skip
