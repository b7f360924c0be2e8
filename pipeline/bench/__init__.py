"""Speed: the decoder alone, and endpoints under load."""
