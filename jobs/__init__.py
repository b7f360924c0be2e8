"""Entry points only, `python -m jobs.<verb>`: parse, call, print. No classes live here."""
