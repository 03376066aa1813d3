"""For tests written for any backend: the fixture that takes the place of theirs."""

from tests.kernels.interpreted.conftest import make_tables

__all__ = ["make_tables"]
