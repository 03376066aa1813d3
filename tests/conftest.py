"""Options of the test run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-steps",
        type=int,
        default=20_000,
        help="steps of the simulator on the CPU in all (default 20,000)",
    )
    parser.addoption(
        "--interpreted-steps",
        type=int,
        default=1_000,
        help="steps of the simulator through interpreted kernels in all (default 1,000)",
    )


@pytest.fixture(scope="session")
def simulated_steps(request: pytest.FixtureRequest) -> int:
    """Steps that the simulator shall do in all."""
    steps: int = request.config.getoption("--simulated-steps")
    return steps


@pytest.fixture(scope="session")
def interpreted_steps(request: pytest.FixtureRequest) -> int:
    """Steps that the simulator shall do through interpreted kernels in all."""
    steps: int = request.config.getoption("--interpreted-steps")
    return steps
