"""A pytest plugin: tests under emulation are of that architecture's native half, or none."""

from __future__ import annotations

import platform


def pytest_configure() -> None:
    from fused_slots.host import rows

    assert platform.machine() == "aarch64"
    assert rows.NATIVE, "the cross-compiled half does not load"
