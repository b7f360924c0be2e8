"""One run: plan, resume, decode, close the books; retry and verify."""
