"""What runs inside one worker, as plain classes without Ray: generator, serving engine, templates, training loop."""
