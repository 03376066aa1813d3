"""Kernels for GPUs and the interpreter; values that belong together travel as NamedTuples."""
