"""How a worker cuts a window of rows into batches, and how many rows fit in its memory."""
