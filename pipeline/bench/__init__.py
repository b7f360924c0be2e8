"""Benchmarks: the decoder in one process, and HTTP servers under load."""
