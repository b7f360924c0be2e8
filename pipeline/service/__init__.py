"""The online endpoint: Ray Serve with the OpenAI completions API on the same decoder."""
