"""Models of transformers: its own modelling code between our layer loop and our KV cache.

transformers' `forward` runs around a stack of stubs (`hollow_model`), its decoder layers are called by our loop
(`decoder`), and their attention comes back to our views (`attention`). transformers' `Cache` and mask sizes are left
out on purpose: both ask one layer for the length of all, and a skipped layer lags behind. transformers is imported in
this folder alone, which only the driver's check of a model and decode workers import.
"""
