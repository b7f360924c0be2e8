"""Lossless decoding: a schedule, n-grams of the row, or other answers draft tokens, and full depth verifies them."""
