"""Benchmarks of the host paths and the CPU operations: `make bench`, or `fused-slots bench`."""
