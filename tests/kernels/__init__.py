"""Tests of the Triton kernels on a machine without a GPU."""
