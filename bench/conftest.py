"""One prepared workload for each benchmark; nothing is shared between two of them."""

import pytest

from bench.prepared import Prepared
from tests.workloads import MEASURED


@pytest.fixture(params=MEASURED, name="prepared")
def _prepared(request: pytest.FixtureRequest) -> Prepared:
    return Prepared(request.param)
