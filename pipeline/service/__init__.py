"""The HTTP server: OpenAI's completions and chat API on Ray Serve, around the same decoder as offline jobs."""
