"""Writes rows: the finished rows of a task become one file per status, with a temporary name until it is complete.

The data files are the record of what is done: a visible file is complete, and its ids are done. Names follow from the
session, the task and the attempt at the task. An attempt writes all rows of its task, since it cannot know what another
one still writes; the files of one attempt count, and the session removes those of others (`RunFolder.run_files`). On a
disk, files are moved there from the session's staging folder, which only the driver creates: once `RunFolder.fence` has
removed it, a writer that outlived its session cannot add a file. Writers delete and replace none, since a store lets
nobody look at the lease and delete in one step. Ray's `write_parquet` is not used, since it leaves a torn file when a
task is killed, and all of Ray's writers keep their results for every block in the driver until the end.
"""

import errno
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.arrow_cast import with_schema
from pipeline.fault_injection import fault_point
from pipeline.schema import STATUS
from pipeline.store.atomic_files import make_folder, put, sync
from pipeline.store.lease import read_lease
from pipeline.store.run_folder import STAGING, STATUSES, RunFolder, id_metadata

DISK_FULL = errno.ENOSPC, errno.EDQUOT
FINISHED_AT_ONCE = 4096  # rows: as Python objects they take many times the memory of their table


class NoSpaceLeft(OSError):
    """The disk is full. The driver searches for this name, since Ray Data passes on only the text of an error."""


@dataclass(frozen=True)
class RunSink:
    """The last stage of the pipeline: a callable for `map_batches`, which returns no rows."""

    filesystem: pafs.FileSystem
    root: str
    """The root of the run folder in `filesystem`."""
    session: str
    schema: pa.Schema
    rows_per_file: int | None
    """The minimum of rows per file, except for the last one; None: a file per block and status."""
    subfolder: str = "data"
    """The folder in the run folder that gets `status=.../` folders."""
    execution_id: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    """A part of the file names that differs between executions, all of which number their tasks from 0."""
    row_keys: Callable[[pa.Table], Sequence[int]] | None = None
    """Numbers that identify the rows of a table (`ids.row_keys`). The sum over a file is stored in its footer, and used
    to reconcile rows. None: rows are identified by `id`, and no sum is stored."""

    def __call__(
        self,
        table: pa.Table,
        finish: Callable[[pa.Table], pa.Table],
        number_of_task: Callable[[], tuple[int, int, str]],
        unpack: Callable[[pa.Table], pa.Table] | None = None,
    ) -> pa.Table:
        """Unpacks, finishes and writes rows; returns no rows.

        The three are one stage because Ray cuts blocks between stages by their bytes, and a repeated task may get other
        rows. `number_of_task`: as `ray_internals.number_of_task`.
        """
        if unpack is not None:
            if not table.num_rows:
                return table
            table = unpack(table)
        parts = range(0, max(table.num_rows, 1), FINISHED_AT_ONCE)
        finished = pa.concat_tables([finish(table.slice(at, FINISHED_AT_ONCE)) for at in parts])
        if finished.num_rows:
            task, batch, attempt = number_of_task()
            self.write(finished, f"{task:06d}-{batch:03d}-{attempt}")
        return finished.select([STATUS]).slice(0, 0)

    def write(self, table: pa.Table, name: str) -> None:
        """Writes one file per status; `name` is unique within one execution."""
        for status in STATUSES:
            rows = table.filter(pc.equal(table[STATUS], status)).drop_columns([STATUS])
            if rows.num_rows:
                ids = {} if self.row_keys is None else id_metadata(sum(self.row_keys(rows)))
                rows = with_schema(rows, self.schema).replace_schema_metadata(ids)
                path = f"{self.subfolder}/status={status}/part-{self.session}-{self.execution_id}-{name}.parquet"
                try:
                    write_whole(self.filesystem, self.root, path, rows, self.session)
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    raise NoSpaceLeft(error.errno, str(error)) from error


def check_session(filesystem: pafs.FileSystem, root: str, session: str) -> None:
    """Raises FileNotFoundError if the lease on the folder is not the session's; elsewhere than on a disk."""
    lease = read_lease(RunFolder(filesystem, root, root))
    if lease is None or lease["session"] != session:  # nothing else stops a writer that outlived its session
        raise FileNotFoundError(f"{root}: session {session} holds this folder no more")


def write_whole(filesystem: pafs.FileSystem, root: str, path: str, table: pa.Table, session: str) -> None:
    """Writes `root/path` atomically; raises FileNotFoundError if the session is over."""
    target = f"{root}/{path}"
    # unique to this attempt: another process, believed dead or not, may be running the same task
    staging = f"{root}/{STAGING}/{session}/{path.replace('/', '_')}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    if not isinstance(filesystem, pafs.LocalFileSystem):
        whole = pa.BufferOutputStream()
        pq.write_table(table, whole, write_page_checksum=True)
        source = pa.BufferReader(whole.getvalue())
        put(filesystem, target, source, staging, lambda: check_session(filesystem, root, session))
        return
    make_folder(os.path.dirname(target))
    top = path.partition("/")[0]
    fault_point(f"{top} begun")
    try:
        pq.write_table(table, staging, filesystem=filesystem, write_page_checksum=True)
    except OSError:  # a part of it would fill the disk until the next session begins
        with suppress(OSError):
            os.unlink(staging)
        raise
    fault_point(f"{top} staged")
    sync(staging)  # if the machine goes down, the name must not survive without the bytes
    fault_point(f"{top} synced")
    os.replace(staging, target)
    fault_point(f"{top} renamed")
    sync(os.path.dirname(target))  # otherwise `run.json` could survive a power loss, and a file that it counts not
