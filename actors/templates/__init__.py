"""Chat templates of checkpoints and row templates of users, rendered in Jinja's sandbox."""
