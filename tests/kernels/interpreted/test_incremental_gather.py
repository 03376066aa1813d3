"""The attacks on incremental gathering through interpreted kernels, with small tiles."""
# ruff: noqa: F401, F403

import pytest

from tests.kernels.test_incremental_gather import *

from tests.kernels.interpreted.backends import make_tables  # isort: skip

pytestmark = pytest.mark.usefixtures("small_tiles")
