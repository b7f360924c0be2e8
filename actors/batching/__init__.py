"""Cutting a window of rows into batches: length buckets, shared prefixes, prompts to score, the full-depth sample."""
