"""The configuration of a model and the sampling parameters of a request, read and checked. No torch."""
