"""Writing rows: each write task makes one file per status, under a temporary name, and renames it when it is whole.

The data files are the record of what is done: a file that is visible is complete, and its ids are done. Names follow
from the write task, so a task that Ray repeats replaces its own file. Ray's `write_parquet` writes in place, where a
killed task leaves a torn file among the data; that is why this is our own.
"""

import os
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data._internal.planner.plan_write_op import WRITE_UUID_KWARG_NAME

from pipeline.schema import STATUS


class RunSink(Datasink[None]):  # type: ignore[misc]
    def __init__(self, filesystem: pafs.FileSystem, root: str, schema: pa.Schema, rows_per_file: int | None) -> None:
        self.filesystem = filesystem
        self.root = root
        self.schema = schema
        self.rows_per_file = rows_per_file

    @property
    def min_rows_per_write(self) -> int | None:
        return self.rows_per_file

    def write(self, blocks: Iterable[Any], ctx: Any) -> None:
        tables = [block for block in blocks if block.num_rows]
        if not tables:
            return
        table = pa.concat_tables(tables)
        name = f"part-{ctx.kwargs[WRITE_UUID_KWARG_NAME][:12]}-{ctx.task_idx:06d}.parquet"
        for status in ("ok", "failed"):
            rows = table.filter(pc.equal(table[STATUS], status)).drop_columns([STATUS])
            path = f"data/status={status}/{name}"
            if rows.num_rows:
                write_whole(self.filesystem, self.root, path, rows.cast(self.schema))
            elif self.filesystem.get_file_info(f"{self.root}/{path}").type == pafs.FileType.File:
                self.filesystem.delete_file(f"{self.root}/{path}")  # of an earlier attempt, whose row has changed sides


def write_whole(filesystem: pafs.FileSystem, root: str, path: str, table: pa.Table) -> None:
    """Writes `root/path` so that it is seen complete or not at all."""
    target = f"{root}/{path}"
    filesystem.create_dir(target.rpartition("/")[0], recursive=True)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        pq.write_table(table, target, filesystem=filesystem)  # an object appears when its upload is closed
        return
    staging = f"{root}/checkpoint/staging/{path.replace('/', '_')}"
    filesystem.create_dir(staging.rpartition("/")[0], recursive=True)
    pq.write_table(table, staging, filesystem=filesystem)
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the name must not outlive the bytes when the machine goes down
    finally:
        os.close(descriptor)
    os.replace(staging, target)
