"""What OpenAI's API and batch files have in common: request parameters and log-probabilities."""
