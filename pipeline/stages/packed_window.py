"""A decoded window as a single row on its way to the writer, so that Ray does not split it.

Ray splits the output of a stage by bytes. If a window is decoded again and its answers have other lengths, it would be
split at other rows, so rows of a part that is already written would be lost or written twice. No torch here.
"""

import numpy as np
import pyarrow as pa

WINDOW = "window"
"""The column of packed windows."""


def pack(table: pa.Table) -> pa.Table:
    """A table as one row."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    data = stream.getvalue()
    offsets = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.table({WINDOW: pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])})


def unpack(packed: pa.Table) -> pa.Table:
    """The rows of one or more packed tables."""
    return pa.concat_tables([pa.ipc.open_stream(window.as_buffer()).read_all() for window in packed[WINDOW]])
