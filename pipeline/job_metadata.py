"""Progress in the metadata of a submitted job: `ray job list`, the dashboard and `JobSubmissionClient.get_job_info`.

Ray 2.60 lets metadata be given with the submission only; there is no public call to change it later. So this writes the
job's record in Ray's own store, its metadata and nothing else, and only while the record says that the job is running.
The record's layout is Ray's; where it is another than expected nothing is written: figures never end a run.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # ray/_private/runtime_env/constants.py
RECORD = "_ray_internal_job_info_{}"  # JobInfoStorageClient.JOB_DATA_KEY in ray/dashboard/modules/job/common.py
NAMESPACE = b"job"


def submission_id() -> str | None:
    """Of the job that this process is the driver of; None outside `ray job submit`."""
    metadata = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("metadata") or {}
    found: str | None = metadata.get("job_submission_id")
    return found


def tell_job(counts: dict[str, Any], elapsed_s: float) -> None:
    """Puts `counts` into the job's metadata, as strings, and `elapsed_s`; does nothing where there is no job."""
    job = submission_id()
    if job is None or not ray.is_initialized():
        return
    key = RECORD.format(job).encode()
    raw = _internal_kv_get(key, namespace=NAMESPACE)
    record = json.loads(raw) if raw else {}
    if record.get("status") != "RUNNING":
        return
    told = {name: str(value) for name, value in counts.items()} | {"elapsed_s": f"{elapsed_s:.0f}"}
    record["metadata"] = (record.get("metadata") or {}) | told
    _internal_kv_put(key, json.dumps(record).encode(), overwrite=True, namespace=NAMESPACE)


def job_teller(note: Callable[[str], None]) -> Callable[[dict[str, Any], float], None]:
    """`tell_job` that never raises, whatever Ray's store holds or does: `note` hears of the first failure."""
    num_failed = 0

    def tell(counts: dict[str, Any], elapsed_s: float) -> None:
        nonlocal num_failed
        try:
            tell_job(counts, elapsed_s)
        except Exception as error:
            num_failed += 1
            if num_failed == 1:
                note(f"progress: the job's metadata cannot be written ({type(error).__name__}: {error})")

    return tell
