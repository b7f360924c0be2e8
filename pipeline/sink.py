"""Writing rows: each write task makes one file per status, under a temporary name, and renames it when it is whole.

The data files are the record of what is done: a file that is visible is complete, and its ids are done. Names follow
from the session and the write task, so a task that Ray repeats replaces its own file. On a disk a file comes from the
session's staging folder, which only the driver makes: once `RunFolder.fence` has taken it away, a writer that outlived
its session cannot add a file. Ray's `write_parquet` writes in place, where a
killed task leaves a torn file among the data; that is why this is our own.
"""

import os
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data._internal.planner.plan_write_op import WRITE_UUID_KWARG_NAME

from pipeline.faults import fault_point
from pipeline.lease import read_lease
from pipeline.run_folder import STAGING, RunFolder, sync
from pipeline.schema import STATUS


class RunSink(Datasink[None]):  # type: ignore[misc]
    def __init__(
        self,
        filesystem: pafs.FileSystem,
        root: str,
        session: str,
        schema: pa.Schema,
        rows_per_file: int | None,
        place: str = "data",
    ) -> None:
        """`root`: of the run folder; `place`: the folder in it that gets `status=.../` folders."""
        self.filesystem = filesystem
        self.root = root
        self.session = session
        self.schema = schema
        self.rows_per_file = rows_per_file
        self.place = place

    @property
    def min_rows_per_write(self) -> int | None:
        return self.rows_per_file

    def write(self, blocks: Iterable[Any], ctx: Any) -> None:
        tables = [block for block in blocks if block.num_rows]
        if not tables:
            return
        table = pa.concat_tables(tables)
        name = f"part-{self.session}-{ctx.kwargs[WRITE_UUID_KWARG_NAME][:6]}-{ctx.task_idx:06d}.parquet"
        for status in ("ok", "failed"):
            rows = table.filter(pc.equal(table[STATUS], status)).drop_columns([STATUS])
            path = f"{self.place}/status={status}/{name}"
            if rows.num_rows:
                write_whole(self.filesystem, self.root, path, rows.cast(self.schema), self.session)
            elif self.filesystem.get_file_info(f"{self.root}/{path}").type == pafs.FileType.File:
                self.filesystem.delete_file(f"{self.root}/{path}")  # of an earlier attempt, whose row has changed sides


def write_whole(filesystem: pafs.FileSystem, root: str, path: str, table: pa.Table, session: str) -> None:
    """Writes `root/path` so that it is seen complete or not at all; FileNotFoundError when the session is over."""
    target = f"{root}/{path}"
    if not isinstance(filesystem, pafs.LocalFileSystem):
        lease = read_lease(RunFolder(filesystem, root, root))
        if lease is None or lease["session"] != session:  # nothing else stops a writer that outlived its session
            raise FileNotFoundError(f"{root}: session {session} holds this folder no more")
        whole = pa.BufferOutputStream()  # an error in the middle would close the upload, and half an object appear
        pq.write_table(table, whole, write_page_checksum=True)
        with filesystem.open_output_stream(target) as stream:
            stream.write(whole.getvalue())
        return
    filesystem.create_dir(target.rpartition("/")[0], recursive=True)
    # of this attempt alone: another process may be at the same task, believed dead or not
    staging = f"{root}/{STAGING}/{session}/{path.replace('/', '_')}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    top = path.partition("/")[0]
    fault_point(f"{top} begun")
    pq.write_table(table, staging, filesystem=filesystem, write_page_checksum=True)
    fault_point(f"{top} staged")
    sync(staging)  # the name must not outlive the bytes when the machine goes down
    fault_point(f"{top} synced")
    os.replace(staging, target)
    fault_point(f"{top} renamed")
