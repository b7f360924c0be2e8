"""The decoder: weights as layers, the layer loop, the language-model head, and its placement on devices."""
