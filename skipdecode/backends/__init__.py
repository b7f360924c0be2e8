"""The compute back ends: the `Backend` interface, compiled C++ kernels for CPUs, Triton kernels for CUDA, and torch
operators as the reference."""
