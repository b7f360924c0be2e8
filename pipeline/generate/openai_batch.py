"""OpenAI batch files out: `batch_output.jsonl` and `batch_errors.jsonl`, made from the finished data files."""

import json
import os
from collections.abc import Iterator

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.schema import OutputRow
from pipeline.store.run_folder import RunFolder
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


def write_batch_files(folder: RunFolder, model: str) -> None:
    """A line per row: answers in `batch_output.jsonl`, failures in `batch_errors.jsonl`; each appears when whole."""
    for status, name in (("ok", "batch_output.jsonl"), ("failed", "batch_errors.jsonl")):
        target = folder.path(name)
        is_local = isinstance(folder.filesystem, pafs.LocalFileSystem)
        with folder.filesystem.open_output_stream(f"{target}.tmp" if is_local else target) as stream:
            for row in _rows(folder, status):
                line = answer_line(row, model) if status == "ok" else error_line(row)
                stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        if is_local:
            os.replace(f"{target}.tmp", target)


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
