"""What a corpus will take: rows, tokens, hours and cost, from a sample of it and the cost model."""
