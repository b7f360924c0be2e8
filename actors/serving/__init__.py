"""The online engine: requests arrive at any time, tokens go out as they are decoded."""
