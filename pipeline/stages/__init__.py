"""What Ray Data runs on each block of rows, inside workers."""
