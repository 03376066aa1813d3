"""Triton kernels, one operation a file, for triton-ascend, Triton on CUDA and the interpreter."""
