"""`skipdecode doctor`: this machine, what a run would choose on it, and what stands in its way."""
