"""Ends batches whose run does not come to its end: failed, expired, cancelled.

The rows that are there become the result files of the batch, as those of a finished run do. The run's lease is held
meanwhile, so that no driver is at work. A run that turns out to be finished is left as it is.
"""

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal

from pipeline.batches.storage import BatchError, ClientStorage, StoredBatch
from pipeline.config.job import InputConfig
from pipeline.formatting import Log
from pipeline.generate.openai_batch import Unanswered, write_batch_files
from pipeline.input.formats import iter_rows
from pipeline.input.ids import made_id
from pipeline.store.lease import Lease
from pipeline.store.run_folder import BATCH_FILES, STATUSES

EXPIRED = "batch_expired", "This request could not be executed before the completion window expired."


def end_batch(
    own: ClientStorage,
    record: StoredBatch,
    status: Literal["failed", "expired", "cancelled"],
    log: Log,
    errors: Sequence[BatchError] = (),
) -> None:
    """Writes the result files and the ending of a batch. ConfigError if a driver may be at work."""
    batch_id, session = record["id"], uuid.uuid4().hex[:12]
    run = own.run(batch_id)
    with Lease(run, session, log) as lease:
        state = run.read_state()
        if own.ending(batch_id) is not None or (state is not None and state["state"] == "finished"):
            return
        total = 0

        def rest(answered: "Counter[str]") -> Iterator[Unanswered]:
            nonlocal total
            for line_id in line_ids(own, record):
                total += 1
                if answered[line_id]:
                    answered[line_id] -= 1
                elif status == "expired":
                    yield (line_id, *EXPIRED)

        if state is not None:
            run.fence(session, lease.check)
        paths = {one: run.run_files(state, [one]) if state else [] for one in STATUSES}
        began = int(state["sessions"][0]["started_at"]) if state else record["created_at"]
        if state is None and status != "expired":  # no result files either: a run could not begin beside them
            total, completed, failed = sum(1 for _ in line_ids(own, record)), 0, 0
        else:
            made = write_batch_files(run, paths, record["model"], began, lease.check, rest=rest)
            completed, failed = (made[name]["lines"] for name in BATCH_FILES)
        run.release(session)
        lease.check()
        lines = {"total": total, "completed": completed, "failed": failed}
        own.end(batch_id, {"status": status, "at": int(time.time()), "errors": list(errors), "lines": lines})


def line_ids(own: ClientStorage, record: StoredBatch) -> Iterator[str]:
    """The id of each line of the input, as its run names it."""
    name = own.input_path(record["id"]).rpartition("/")[2]
    limit = int(record["job"]["limits"]["max_line_bytes"])
    with closing(own.open_input(record["id"])) as stream:
        for row in iter_rows(stream, name, "openai_batch", InputConfig(), limit):
            yield made_id(name, row.number) if row.id is None else row.id
