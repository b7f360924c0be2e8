"""Progress in the metadata of a submitted job: `ray job list`, the dashboard and `JobSubmissionClient.get_job_info`.

Ray 2.60 lets metadata be given with the submission only; there is no public call to change it later. So this writes the
job's record in Ray's own store, its metadata and nothing else, and only while the record says that the job is running.
The record's layout is Ray's; where it is another than expected nothing is written: figures never end a run.
"""

import json
import os
from collections.abc import Callable
from typing import TypedDict

import ray

from pipeline.cluster.ray_internals import JOB_CONFIG, update_job_record
from pipeline.cluster.worker_records import Counts
from pipeline.formatting import Json


class JobProgress(Counts):
    """The progress of a job."""

    rows_done: int
    rows_total: int


class _JobConfig(TypedDict, total=False):
    metadata: dict[str, str] | None


def submission_id() -> str | None:
    """The id of the job that this process is the driver of; None outside `ray job submit`."""
    config: _JobConfig = json.loads(os.environ.get(JOB_CONFIG, "{}"))
    return (config.get("metadata") or {}).get("job_submission_id")


def tell_job(counts: JobProgress, elapsed_s: float) -> None:
    """Puts `counts` and `elapsed_s` into the job's metadata, as strings; does nothing outside of a submitted job."""
    job = submission_id()
    if job is None or not ray.is_initialized():
        return
    progress: dict[str, Json] = {name: str(value) for name, value in counts.items()}
    progress["elapsed_s"] = f"{elapsed_s:.0f}"

    def update(record: dict[str, Json]) -> bool:
        if record.get("status") != "RUNNING":
            return False
        before = record.get("metadata") or {}
        if not isinstance(before, dict):
            raise TypeError(f"the metadata of a job is no mapping: {before!r}")
        record["metadata"] = before | progress
        return True

    update_job_record(job, update)


def job_teller(log: Callable[[str], None]) -> Callable[[JobProgress, float], None]:
    """`tell_job` that never raises, whatever Ray's store holds or does; the first failure is logged."""
    num_failed = 0

    def tell(counts: JobProgress, elapsed_s: float) -> None:
        nonlocal num_failed
        try:
            tell_job(counts, elapsed_s)
        except Exception as error:
            num_failed += 1
            if num_failed == 1:
                log(f"progress: the job's metadata cannot be written ({type(error).__name__}: {error})")

    return tell
