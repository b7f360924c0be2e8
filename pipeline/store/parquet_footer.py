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
    """Rows, and the sum of their ids in hex. OSError where the footer does not say it: no run wrote the file so."""
    footer = pq.read_metadata(path, filesystem=filesystem)
    id_sum = (footer.metadata or {}).get(IDS)
    if id_sum is None:
        raise OSError(f"{path}: the footer does not say the sum of its ids, so no run wrote it as it is; delete it")
    return [int(footer.num_rows), id_sum.decode()]
