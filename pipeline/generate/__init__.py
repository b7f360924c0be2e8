"""One run: plan, resume, decode, reconcile; retry and verify."""
