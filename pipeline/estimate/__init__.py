"""What a corpus will take before it is decoded: rows, tokens, hours and cost, from a sample of it and the cost model."""
