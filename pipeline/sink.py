"""Writing rows: each block of them becomes one file per status, under a temporary name that it loses when it is whole.

The data files are the record of what is done: a file that is visible is complete, and its ids are done. Names follow
from the session and the rows, so a task that Ray repeats replaces its own file. On a disk a file comes from the
session's staging folder, which only the driver makes: once `RunFolder.fence` has taken it away, a writer that outlived
its session cannot add a file. Ray's `write_parquet` writes in place, where a killed task leaves a torn file among the
data; and all of Ray's writers keep a result per block in the driver until the end, which a corpus has too many of.
"""

import hashlib
import os
import uuid
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from ray.data._internal.execution.interfaces.task_context import TaskContext

from pipeline.faults import fault_point
from pipeline.lease import read_lease
from pipeline.run_folder import STAGING, RunFolder, sync
from pipeline.schema import STATUS


@dataclass(frozen=True)
class RunSink:
    """The last stage of Ray Data: takes finished rows, gives none on."""

    filesystem: pafs.FileSystem
    root: str
    """Of the run folder."""
    session: str
    schema: pa.Schema
    rows_per_file: int | None
    """None: a file per block and status."""
    place: str = "data"
    """The folder in the run folder that gets `status=.../` folders."""

    def __call__(self, table: pa.Table) -> pa.Table:
        if table.num_rows:
            self.write(table, number())
        return table.select([STATUS]).slice(0, 0)

    def write(self, table: pa.Table, number: int) -> None:
        """One file per status. `number`: of the task, so that names are in the order of the work."""
        rows = hashlib.sha256("\0".join(table["id"].to_pylist()).encode()).hexdigest()[:12]
        name = f"part-{self.session}-{number:06d}-{rows}.parquet"
        for status in ("ok", "failed"):
            part = table.filter(pc.equal(table[STATUS], status)).drop_columns([STATUS])
            path = f"{self.place}/status={status}/{name}"
            if part.num_rows:
                write_whole(self.filesystem, self.root, path, part.cast(self.schema), self.session)
            elif self.filesystem.get_file_info(f"{self.root}/{path}").type == pafs.FileType.File:
                self.filesystem.delete_file(f"{self.root}/{path}")  # of an earlier attempt, whose row has changed sides


def number() -> int:
    """Of the task of Ray Data that this is; the same when Ray repeats it."""
    context = TaskContext.get_current()
    assert context is not None, "rows are written by tasks of Ray Data"
    return int(context.task_idx)


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
