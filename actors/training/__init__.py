"""The training loop of one worker, its recipe and its state."""
