"""These tests need an environment of their own (see requirements.txt); elsewhere none is found."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("ascendnpuir") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-budgets", action="store_true", help="record today's costs as the budgets"
    )
    parser.addoption(
        "--all-variants", action="store_true", help="compile every variant for Ascend 950 too"
    )
