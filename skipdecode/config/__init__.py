"""What a model's `config.json` and a request's sampling parameters say, read and checked. No torch."""
