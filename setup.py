"""The native half of staging, the one thing that pyproject.toml cannot say."""

import sys
import sysconfig

from setuptools import Extension, setup

# The buffer protocol is in the limited API since 3.11; free-threaded builds have no limited API.
LIMITED = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "fused_slots.host._staging",
            ["fused_slots/host/_staging.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
            py_limited_api=LIMITED,
            optional=True,  # without a compiler the half in Python does the same
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
