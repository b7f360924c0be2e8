"""The metrics collector: an actor that receives a record of every batch from the workers.

It counts for the progress line, writes `metrics/*.parquet` and updates Ray's Prometheus endpoint. Workers send and
never wait for it, so losing the collector loses figures but no rows. `read_metrics` reads the files back.
"""

import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray
from ray.actor import ActorHandle

from pipeline.cluster.pool import on_this_node
from pipeline.cluster.worker_records import BatchRecord, Counts, Pace, WindowRecord, WorkerRecord
from pipeline.formatting import Log
from pipeline.report.metrics_schemas import SCHEMAS, Kind, Record
from pipeline.report.prometheus import LiveMetrics
from pipeline.store.row_writer import write_whole
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState

FLUSH_S = 15.0
SLICE_ROWS = 1 << 16  # records that a reader has in memory at a time


class MetricsCollector:
    """Wrapped as a Ray actor by `start_collector`; plain otherwise."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, run_id: str, rows_planned: int) -> None:
        self._filesystem, self._root, self._run_id = filesystem, root, run_id
        self._pending: dict[Kind, list[tuple[str, Record]]] = {kind: [] for kind in SCHEMAS}  # with their workers
        self._num_files = 0
        self._flushed_at = time.monotonic()
        self._counts = Counts(
            rows=0, failed=0, input_tokens=0, output_tokens=0, workers=0, restarts=0, sitting_out=0, working_s=0.0
        )
        self._workers, self._sitting_out = set[str](), set[str]()
        self._batches = self._pairs = 0
        self._own_s = self._full_s = 0.0
        self._ready_at: float | None = None
        self._live = LiveMetrics(run_id, rows_planned)

    def worker_started(self, worker: str, record: WorkerRecord) -> None:
        self._pending["workers"].append((worker, record))
        if self._ready_at is None:
            self._ready_at = time.monotonic()
        self._counts["restarts"] += worker in self._workers
        self._workers.add(worker)
        self._counts["workers"] = len(self._workers)
        self._live.worker_started(worker, record["load_s"])

    def worker_sits_out(self, worker: str) -> None:
        """A worker cannot work, and will not for the rest of the run."""
        self._sitting_out.add(worker)
        self._counts["sitting_out"] = len(self._sitting_out)

    def window_done(self, worker: str, window: WindowRecord, batches: Sequence[BatchRecord]) -> None:
        self._pending["windows"].append((worker, window))
        self._pending["batches"] += [(worker, batch) for batch in batches]
        self._counts["rows"] += window["rows"]
        self._counts["failed"] += window["failed"]
        for batch in batches:
            self._counts["input_tokens"] += batch["input_tokens"]
            self._counts["output_tokens"] += batch["output_tokens"]
            self._time(batch)
        self._live.window_done(window, batches)
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def _time(self, batch: BatchRecord) -> None:
        self._batches += 1
        self._own_s += batch["prefill_s"] + batch["decode_s"] + batch.get("score_s", 0.0)
        if "full_prefill_s" in batch:
            self._pairs += 1
            self._full_s += batch["full_prefill_s"] + batch["full_decode_s"]

    def pace(self) -> Pace:
        """Totals so far, from which the remaining time is estimated."""
        return {
            "rows": self._counts["rows"],
            "failed": self._counts["failed"],
            "output_tokens": self._counts["output_tokens"],
            "workers": self._counts["workers"],
            "batches": self._batches,
            "pairs": self._pairs,
            "own_s": self._own_s,
            "full_s": self._full_s,
        }

    def counts(self) -> Counts:
        """What has been decoded since this start of the run; the time since the first worker was ready, whose loading
        says nothing about the pace."""
        self._live.refresh()
        working_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return {**self._counts, "working_s": round(working_s, 1)}

    def flush(self) -> None:
        """Writes what is pending; called every FLUSH_S seconds and at the end."""
        for kind, records in self._pending.items():
            if records:
                table = pa.Table.from_pylist(
                    [{**record, "worker": name} for name, record in records], schema=SCHEMAS[kind]
                )
                path = f"metrics/{kind}-{self._run_id}-{self._num_files:05d}.parquet"
                write_whole(self._filesystem, self._root, path, table, self._run_id)
                self._num_files += 1
                records.clear()
        self._flushed_at = time.monotonic()


def start_collector(filesystem: pafs.FileSystem, root: str, run_id: str, rows_planned: int) -> ActorHandle:
    """The collector as an actor on this node; it takes no CPU from the pool."""
    actor = ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(MetricsCollector)
    return actor.remote(filesystem, root, run_id, rows_planned)


def read_metrics(
    folder: RunFolder, state: RunState, kind: Kind, columns: Sequence[str] = (), log: Log = lambda _: None
) -> Iterator[pa.Table]:
    """Records of one kind (`batches`, `windows`, `workers`) of the sessions of `state`, a slice at a time; all columns
    where none is named.

    A column that a file lacks is null. A damaged file costs figures, and no more: `log` hears of it, and what could be
    read of it has been given.
    """
    schema = SCHEMAS[kind]
    wanted = pa.schema([schema.field(name) for name in columns or schema.names])
    own = tuple(f"{kind}-{session['id']}-" for session in state["sessions"])
    for path in folder.files("metrics"):
        if not path.rpartition("/")[2].startswith(own):
            continue
        try:
            with pq.ParquetFile(path, filesystem=folder.filesystem, page_checksum_verification=True) as file:
                there = [name for name in wanted.names if name in file.schema_arrow.names]
                for batch in file.iter_batches(SLICE_ROWS, columns=there):
                    found = pa.Table.from_batches([batch])
                    yield pa.concat_tables([wanted.empty_table(), found], promote_options="default")
        except (OSError, pa.ArrowException) as error:
            log(f"{path}: left out, the figures lack what it says: {error}")
