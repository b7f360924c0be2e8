"""Answers as text: streamed while they are written, with reasoning and calls of tools told apart."""
