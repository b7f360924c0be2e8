"""The stages that Ray Data runs on each block of rows, inside workers."""
