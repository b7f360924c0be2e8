"""What a batch is at this moment, as OpenAI's object: read from its records and its run folder, and kept nowhere.

So every replica, and an endpoint that was started again, say the same. The states in order:

    validating                there is a record, and no `run.json` yet
    in_progress               there is a `run.json`
    finalizing                the data files have all rows, and the run is not finished
    completed                 the run is finished
    cancelling                a cancellation was asked for, and nothing of the below has happened
    failed, expired, cancelled   there is an `Ending`

A batch whose last rows were made while its cancellation came is `completed`. No state is left for an earlier one: rows
are never taken back, a run that is finished stays so, and an `Ending` is written while the run's lease is held.
"""

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from pipeline.batches.storage import RESULTS, ClientStorage, Ending, FileRecord, StoredBatch, result_id
from pipeline.formatting import Json
from pipeline.store.lease import read_lease
from pipeline.store.run_folder import STATUSES, RunFolder, read_footer
from pipeline.store.run_state import RunState

STATES: Final = (
    "validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired", "failed"
)  # fmt: skip
TERMINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})
FULL_BYTES: Final = 16 << 20
"""Free bytes of a disk with which a batch may get no further: a file of rows has up to 8 MiB."""
FULL: Final = "hardly any space is left where batches are kept; the batch goes on when there is space"
MAX_KEPT: Final = 200_000
_rows: dict[tuple[str, str], int] = {}
"""Rows of data files, which never change once they are there."""


Counts: TypeAlias = dict[str, int]
"""OpenAI's `request_counts`, of lines of the input: total, completed, failed."""


def file_object(record: FileRecord) -> dict[str, Json]:
    """OpenAI's object of an uploaded file."""
    own = {key: record[key] for key in ("id", "bytes", "created_at", "expires_at", "filename")}
    return {"object": "file", "purpose": "batch", "status": "processed", "status_details": None, **own}


def status_of(ending: Ending | None, state: RunState | None, is_cancelled: bool, num_rows: Callable[[], int]) -> str:
    """The state of a batch; `num_rows`: good and failed rows so far, asked for only where they matter."""
    if ending is not None:
        return ending["status"]
    if state is not None and state["state"] == "finished":
        return "completed"
    if is_cancelled:
        return "cancelling"
    if state is None:
        return "validating"
    return "finalizing" if num_rows() >= state["books"]["input"] else "in_progress"


class BatchView:
    """One look at a batch."""

    def __init__(self, own: ClientStorage, record: StoredBatch) -> None:
        self.own, self.record = own, record
        self.cancelling_at = own.cancelled_at(record["id"])
        self.run = own.run(record["id"])
        self.state = self.run.read_state()
        self.ending = own.ending(record["id"])  # last: what ended while we looked has ended
        self._rows: dict[str, int] | None = None
        self.status = status_of(
            self.ending, self.state, self.cancelling_at is not None, lambda: sum(self.rows().values())
        )

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL

    def rows(self) -> dict[str, int]:
        """Rows in the data files, by status."""
        if self._rows is None:
            self._rows = count_rows(self.run, self.state)
        return self._rows

    def counts(self) -> Counts:
        """Of lines. While a batch runs, lines with several answers count by the share of the answers that are there."""
        if self.ending is not None:
            return self.ending["lines"]
        if self.state is None:
            return {"total": 0, "completed": 0, "failed": 0}
        total, all_rows = self.state["input"]["documents"], max(self.state["books"]["input"], 1)
        if self.status == "completed":
            good, bad = (self.state["answers"][RESULTS[kind]]["lines"] for kind in ("output", "errors"))
            return {"total": total, "completed": good, "failed": bad}
        rows = self.rows()
        return {
            "total": total,
            "completed": rows["ok"] * total // all_rows,
            "failed": rows["failed"] * total // all_rows,
        }

    def duration_s(self) -> float:
        """Seconds that drivers have worked on it."""
        if self.state is None:
            return 0.0
        return sum(self._end(session) - session["started_at"] for session in self.state["sessions"])

    def _end(self, session: Any) -> float:
        if session["ended_at"] is not None:
            return float(session["ended_at"])
        if read_lease(self.run) is not None:
            return time.time()
        paths = self.run.all_data_files()
        times = [info.mtime.timestamp() for info in self.run.filesystem.get_file_info(paths) if info.mtime is not None]
        return float(max([session["started_at"], *times]))

    def cost(self) -> float | None:
        """In the currency of `price_per_hour`; None without a price."""
        price = self.record["job"]["actors"]["price_per_hour"]
        return None if price is None else round(float(price) * self.duration_s() / 3600, 6)

    def ended_at(self) -> int | None:
        if self.ending is not None:
            return self.ending["at"]
        if self.status != "completed" or self.state is None:
            return None
        return int(self.state["sessions"][-1]["ended_at"] or 0)

    def results_expire_at(self) -> int | None:
        """When the result files are deleted, once the batch has ended."""
        ended_at = self.ended_at()
        return None if ended_at is None else ended_at + self.record["output_expires_after_s"]

    def result_file(self, kind: str) -> dict[str, Json] | None:
        """The object of a result file; None if there is none (any more)."""
        if not self.has_ended:
            return None
        size, expires_at = self.own.result_bytes(self.record["id"], kind), self.results_expire_at()
        if not size or (expires_at is not None and time.time() >= expires_at):
            return None
        return {
            "id": result_id(self.record["id"], kind),
            "object": "file",
            "bytes": size,
            "created_at": self.ended_at(),
            "expires_at": expires_at,
            "filename": f"{self.record['id']}_{kind}.jsonl",
            "purpose": "batch_output",
            "status": "processed",
            "status_details": None,
        }

    def batch_object(self) -> dict[str, Json]:
        """OpenAI's object; `duration_s` and `cost` are extensions."""
        record, status, state = self.record, self.status, self.state
        ended_at = self.ended_at()
        files = {kind: self.result_file(kind) for kind in ("output", "errors")}
        errors: list[Any] = [] if self.ending is None else list(self.ending["errors"])
        if not self.has_ended and (free := self.own.free_bytes()) is not None and free < FULL_BYTES:
            errors.append({"code": "storage_full", "message": FULL, "param": None, "line": None})
        finalizing_at = state["sessions"][-1]["ended_at"] if state and status in ("finalizing", "completed") else None
        return {
            "id": record["id"],
            "object": "batch",
            "endpoint": record["endpoint"],
            "model": record["model"],
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": record["input_file_id"],
            "completion_window": record["completion_window"],
            "status": status,
            "output_file_id": (files["output"] or {}).get("id"),
            "error_file_id": (files["errors"] or {}).get("id"),
            "created_at": record["created_at"],
            "in_progress_at": int(state["sessions"][0]["started_at"]) if state else None,
            "expires_at": record["expires_at"],
            "finalizing_at": None if finalizing_at is None else int(finalizing_at),
            "completed_at": ended_at if status == "completed" else None,
            "failed_at": ended_at if status == "failed" else None,
            "expired_at": ended_at if status == "expired" else None,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": ended_at if status == "cancelled" else None,
            "request_counts": {**self.counts()},
            "usage": self._usage(),
            "metadata": {**record["metadata"]} if record["metadata"] is not None else None,
            "duration_s": round(self.duration_s(), 1),
            "cost": self.cost(),
        }

    def _usage(self) -> dict[str, Json] | None:
        """Tokens, once the run is finished."""
        report = self.state.get("report") if self.state and self.status == "completed" else None
        if report is None:
            return None
        read, made = int(report["total_input_tokens"]), int(report["total_output_tokens"])
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + made,
        }


def count_rows(folder: RunFolder, state: RunState | None) -> dict[str, int]:
    """Rows in the data files of a run, by status, from footers that are read once."""
    if state is None:
        return dict.fromkeys(STATUSES, 0)
    counts = dict.fromkeys(STATUSES, 0)
    for path in folder.run_files(state):
        key = (folder.shown, path)
        if (rows := _rows.get(key)) is None:  # one look, since other threads may empty it
            if len(_rows) > MAX_KEPT:
                _rows.clear()
            rows = _rows[key] = int(read_footer(folder.filesystem, path)[0])
        counts["ok" if "/status=ok/" in path else "failed"] += rows
    return counts
