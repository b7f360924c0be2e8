"""Decoding batches of requests: prefill, static and continuous batches, prefix sharing, CUDA graphs."""
