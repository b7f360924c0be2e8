"""`skipdecode export`: the rows of a run as a Hugging Face data set, JSON Lines or Parquet."""
