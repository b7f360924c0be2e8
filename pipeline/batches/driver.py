"""The process of one batch: checks its lines, and runs it as `jobs.generate` runs a corpus, resuming what is there.

    python -m pipeline.batches.driver STORAGE CLIENT BATCH_ID [APPLICATION DEPLOYMENT]

With the names of a deployment of Ray Serve, its replicas decode the rows (`batches.workers: shared`).
Started by the runner (`runner`), on the Ray cluster that RAY_ADDRESS names. It ends when its standard input does: a
runner that dies takes its drivers along, and the next one starts them again. The exit code says nothing; what happened
is in the storage.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Final

from pipeline.batches.ending import end_batch
from pipeline.batches.run_config import job_config
from pipeline.batches.storage import BatchError, ClientStorage, Storage, StoredBatch
from pipeline.cluster.priority import run_in_background
from pipeline.config.job import ConfigError
from pipeline.formatting import Log
from pipeline.generate.run import run
from pipeline.input.json_rows import parse_object
from pipeline.input.line_reader import LongLine, RowError, iter_lines
from pipeline.input.openai_rows import CHAT_URLS
from pipeline.json_size import count_marks
from pipeline.openai_format.parameters import shown
from pipeline.stages.endpoint_model import EndpointName

MAX_ERRORS: Final = 100  # that a batch object names
NOT_ITS_FAULT: Final = ("actors", "output", "model.source", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR")
"""Keys, and sections, of what may be right in a moment: too few free CPUs, another driver at work, the disk with the
model, a cluster that starts again."""
LAST_S: Final = 60.0


def main(storage: str, client: str, batch_id: str, *endpoint: str) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()
    own = Storage(storage).client(client)
    record = own.batch(batch_id)
    if record is not None and record["job"]["actors"]["background"]:
        run_in_background()
    if record is not None and own.ending(batch_id) is None:
        run_batch(own, record, lambda line: _log(f"{batch_id}: {line}"), EndpointName(*endpoint) if endpoint else None)


def run_batch(own: ClientStorage, record: StoredBatch, log: Log, endpoint: EndpointName | None = None) -> None:
    """Runs the batch, or what is left of it. A batch whose input cannot be run is ended as failed. `endpoint` as in
    `generate.run`."""
    if own.run(record["id"]).read_state() is None and (errors := list(islice(find_errors(own, record), MAX_ERRORS))):
        end_batch(own, record, "failed", log, errors)
        return

    def check() -> None:  # another queue may have ended the batch while this process planned its run
        if own.ending(record["id"]) is not None:
            raise ConfigError("output.path", "the batch has ended")

    try:
        run(job_config(own, record, record["expires_at"] - time.time()), log, check, endpoint)
    except ConfigError as error:
        log(str(error))
        is_unread = error.key == "input.path" and isinstance(error.__cause__, OSError)  # the storage did not answer
        keys = {key for key, _ in error.problems}
        if not is_unread and not (keys | {key.partition(".")[0] for key in keys}) & set(NOT_ITS_FAULT):
            found: list[BatchError] = [
                {"code": "invalid_batch", "message": message, "param": key or None, "line": None}
                for key, message in error.problems
            ]
            end_batch(own, record, "failed", log, found)


def find_errors(own: ClientStorage, record: StoredBatch) -> Iterator[BatchError]:
    """What is wrong with the input as a whole: no lines, or lines for another model or endpoint than the batch's.

    A line that is bad by itself is a line of the errors file, as in any run.
    """
    names = record["model_names"]
    wants_chat, count = record["endpoint"] in CHAT_URLS, 0
    limit = int(record["job"]["limits"]["max_line_bytes"])
    with closing(own.open_input(record["id"])) as stream:
        for number, line in enumerate(iter_lines(stream, limit), start=1):
            count += bool(line.strip()) or isinstance(line, LongLine)
            try:
                value = parse_object(line, count_marks(line))
            except RowError:
                continue
            body, url = value.get("body"), value.get("url")
            model = body.get("model") if isinstance(body, dict) else None
            if isinstance(model, str) and model not in names:
                message = f"the model {shown(model)} does not exist here; there is {shown(record['model'])}"
                yield {"code": "model_not_found", "message": message, "param": "body.model", "line": number}
            if isinstance(url, str) and (url in CHAT_URLS) != wants_chat:
                message = f"the batch is for {record['endpoint']}, got {shown(url)}"
                yield {"code": "mismatched_endpoint", "message": message, "param": "url", "line": number}
    if not count:
        yield {"code": "empty_file", "message": "the file has no lines", "param": "input_file_id", "line": None}


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)  # ends the run as Ctrl-C does (`generate.stopping`), or at once
    time.sleep(LAST_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
