"""What this machine is, and what is wrong with it."""
