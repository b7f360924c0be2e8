"""OpenAI batch files out: `batch_output.jsonl` and `batch_errors.jsonl`, made from the finished data files.

They are part of what a finished run has: `run.json` says how long they are, and one that is not is made again.
"""

import json
from collections.abc import Callable, Iterator

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.schema import OutputRow
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from pipeline.units import Json

COLUMNS = [
    "id",
    "generated_text",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "error_code",
    "error_message",
]


FILES = {"ok": "batch_output.jsonl", "failed": "batch_errors.jsonl"}
"""By the status of their rows."""


def write_batch_files(folder: RunFolder, model: str, check: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    """A line per row: answers in `batch_output.jsonl`, failures in `batch_errors.jsonl`; each appears when whole, and
    after `check`. Gives the lines and bytes of each."""
    written = {}
    for status, name in FILES.items():
        lines = num_bytes = 0
        with folder.replacing(name, check) as file:
            for row in _rows(folder, status):
                line = answer_line(row, model) if status == "ok" else error_line(row)
                lines += 1
                num_bytes += file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        written[name] = [lines, num_bytes]
    return written


def has_batch_files(folder: RunFolder, state: RunState) -> bool:
    """Whether a finished run has its batch files (of other inputs there are none), as long as they were written.

    Of a run of an earlier version, which wrote no lengths down, the lines are counted.
    """
    if "input" not in state or state["input"]["format"] != "openai_batch":
        return True
    if (written := state.get("answers")) is None:
        books = state["books"]
        return [count_lines(folder, name) for name in FILES.values()] == [books["ok"], books["failed"]]
    sizes = {name: folder.filesystem.get_file_info(folder.path(name)).size for name in written}
    return sizes == {name: num_bytes for name, (_, num_bytes) in written.items()}


def count_lines(folder: RunFolder, name: str) -> int:
    """0 where there is no such file."""
    if folder.filesystem.get_file_info(folder.path(name)).type != pafs.FileType.File:
        return 0
    with folder.filesystem.open_input_stream(folder.path(name)) as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def _rows(folder: RunFolder, status: str) -> Iterator[OutputRow]:
    for path in folder.data_files(status):
        with pq.ParquetFile(path, filesystem=folder.filesystem) as file:
            for batch in file.iter_batches(columns=COLUMNS):
                yield from batch.to_pylist()


def answer_line(row: OutputRow, model: str) -> dict[str, Json]:
    """A line of the output file, as OpenAI's batch API writes it for /v1/completions."""
    read, made = row["num_input_tokens"], row["num_generated_tokens"]
    choice: dict[str, Json] = {"index": 0, "text": row["generated_text"], "logprobs": None}
    choice["finish_reason"] = row["finish_reason"]
    body: dict[str, Json] = {
        "id": f"cmpl-{row['id']}",
        "object": "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made},
    }
    response: dict[str, Json] = {"status_code": 200, "request_id": f"req-{row['id']}", "body": body}
    return {"id": f"batch_req_{row['id']}", "custom_id": row["id"], "response": response, "error": None}


def error_line(row: OutputRow) -> dict[str, Json]:
    """A line of the errors file."""
    error: dict[str, Json] = {"code": row["error_code"], "message": row["error_message"]}
    return {"id": f"batch_req_{row['id']}", "custom_id": row["id"], "response": None, "error": error}
