"""Everything that knows Ray Data and Parquet: configuration, input, stages, run folder, report."""
