"""The method: which sublayers run for which token, and an OPT decoder that obeys. Pure torch, no Ray."""
