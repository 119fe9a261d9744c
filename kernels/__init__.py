"""Triton kernels, one idea a file."""
