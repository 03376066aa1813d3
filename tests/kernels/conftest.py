"""Kernels that are interpreted are not compiled, so a process runs one kind of tests."""

import os

collect_ignore = ["test_compile.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []
