"""The footer of a data file: how many rows it has, and the sum of their ids. Left out: the rows."""

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.store.run_state import FileRecord

IDS = b"skipdecode.ids"
"""The key of the sum of the digests of the rows' ids, modulo 2^128, in hex."""


def id_metadata(id_sum: int) -> dict[bytes, bytes]:
    """What a data file says of the ids of its rows."""
    return {IDS: f"{id_sum:032x}".encode()}


def read_footer(filesystem: pafs.FileSystem, path: str) -> FileRecord:
    """Rows, and the sum of their ids in hex; "" where the footer does not say it, as in a file that no run wrote."""
    footer = pq.read_metadata(path, filesystem=filesystem)
    return [int(footer.num_rows), (footer.metadata or {}).get(IDS, b"").decode()]
