"""Results depend on no default of torch or NumPy, through interpreted kernels."""
# ruff: noqa: F401

from tests.test_torch_defaults import test_a_managers_results_depend_on_no_default

from tests.kernels.interpreted.backends import make_tables  # isort: skip
