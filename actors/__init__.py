"""What lives inside one worker: plain classes without Ray (tokenizer, generator, train loop)."""
