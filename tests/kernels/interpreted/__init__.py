"""Tests that run kernels in Triton's interpreter: `make test-interpreted`."""
