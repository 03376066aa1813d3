"""A file too few or too many in a wheel or an sdist is named."""

from __future__ import annotations

import pytest

from tests.artefacts.contents import (
    METADATA,
    NATIVE,
    SOURCE,
    sdist_differences,
    wheel_differences,
)

FILES = {"fused_slots/__init__.py", "fused_slots/py.typed", SOURCE, "tests/test_x.py", "README.md"}
WHEEL = {
    "fused_slots/__init__.py",
    "fused_slots/py.typed",
    NATIVE,
    *(f"fused_slots-1.dist-info/{name}" for name in METADATA),
}
SDIST = {"fused_slots-1/PKG-INFO", "fused_slots-1/setup.cfg", "fused_slots-1/x.egg-info/PKG-INFO"}
SDIST |= {f"fused_slots-1/{name}" for name in FILES}


def test_what_belongs_there_is_no_difference() -> None:
    assert wheel_differences(WHEEL, FILES) == []
    assert sdist_differences(SDIST, FILES) == []


OTHER = "fused_slots/host/_staging.cpython-310-aarch64-linux-gnu.so"


def test_a_wheel_of_one_python_has_its_own_native_half_and_no_other() -> None:
    assert wheel_differences(WHEEL - {NATIVE} | {OTHER}, FILES) == []
    assert wheel_differences(WHEEL | {OTHER}, FILES) == [f"wheel: {NATIVE} does not belong there"]


@pytest.mark.parametrize("name", ["fused_slots/py.typed", NATIVE])
def test_a_file_that_the_wheel_lacks_is_named(name: str) -> None:
    assert wheel_differences(WHEEL - {name}, FILES) == [f"wheel: {name} is missing"]


@pytest.mark.parametrize("name", ["tests/test_x.py", SOURCE, "fused_slots/left_over.py"])
def test_a_file_too_many_in_the_wheel_is_named(name: str) -> None:
    assert wheel_differences(WHEEL | {name}, FILES) == [f"wheel: {name} does not belong there"]


def test_what_the_sdist_lacks_or_has_too_much_is_named() -> None:
    names = SDIST - {"fused_slots-1/README.md"} | {"fused_slots-1/tests/.cache/stranger.py"}
    assert sdist_differences(names, FILES) == [
        "sdist: README.md is missing",
        "sdist: tests/.cache/stranger.py does not belong there",
    ]
