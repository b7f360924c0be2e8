"""Chat templates of checkpoints and row templates of users, rendered by sandboxed Jinja."""
