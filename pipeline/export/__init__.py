"""`export`: the rows of a run as files for others: JSON Lines, Parquet, or a data set of Hugging Face."""
