"""How the decoder runs on a CPU: which back end by instruction set, its compiled kernels, and their callers."""
