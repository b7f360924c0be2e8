"""A few rows of a finished run, to look at."""

import pyarrow.parquet as pq

from pipeline.schema import OutputRow
from pipeline.store.run_folder import RunFolder


def sample_rows(folder: RunFolder, count: int) -> list[OutputRow]:
    """`count` good rows, evenly spread over the files and over each file."""
    paths = folder.data_files("ok")
    rows: list[OutputRow] = []
    for i in range(count if paths else 0):
        table = pq.read_table(paths[i * len(paths) // count], filesystem=folder.filesystem, partitioning=None)
        rows += table.slice(i * table.num_rows // count, 1).to_pylist()
    return rows
