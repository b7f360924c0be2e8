"""Lossless decoding: a schedule or an n-gram drafts tokens, and full depth verifies them."""
