"""Estimates of rows, tokens, hours and cost of a corpus, from a sample of it and the cost model."""
