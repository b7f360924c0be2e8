"""OpenAI batch files out: `batch_output.jsonl` and `batch_errors.jsonl`, made from the finished data files.

They are part of what a finished run has: `run.json` says how long they are, and one that is not is made again.
"""

import json
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.formatting import Json
from pipeline.generate.openai_answers import NOT_KNOWN, AnswerRow, Gathered, answer_line, error_line, lines_of
from pipeline.input.openai_rows import CHAT_URL, check_target, line_samples
from pipeline.input.rows import RowError
from pipeline.schema import CHOICE, SAMPLE, SOURCE_ID
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState

COLUMNS: Final = (
    "id",
    "generated_text",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "error_code",
    "error_message",
)
SOURCES: Final = (SOURCE_ID, SAMPLE, "method", "body")
"""Columns that say which line a row belongs to, where lines have several."""
ROWS_AT_ONCE: Final = 256  # with the bodies of their lines

FILES = {"ok": "batch_output.jsonl", "failed": "batch_errors.jsonl"}
"""By the status of their lines."""


class _Lines:
    """Lines on their way into a file, counted."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_lines = self.num_bytes = 0

    def write(self, line: dict[str, Json]) -> None:
        self.num_lines += 1
        self.num_bytes += self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def write_batch_files(
    folder: RunFolder, model: str, created: int, check: Callable[[], None] = lambda: None, samples: int = 1
) -> dict[str, list[int]]:
    """A line for each line of the input: answers in `batch_output.jsonl`, failures, be it of one of its samples, in
    `batch_errors.jsonl`; each file appears when whole, and after `check`. Gives the lines and bytes of each.

    `created`: of all answers, in seconds since 1970. `samples`: of a line that does not say it.
    """
    with (
        folder.replacing(FILES["failed"], check) as bad,
        folder.replacing(FILES["ok"], check) as good,
        Gathered() as gathered,
    ):
        lines = {"ok": _Lines(good), "failed": _Lines(bad)}
        for status in FILES:
            for row in _rows(folder, status, samples):
                if row.get("samples", 1) == 1:
                    lines[status].write(answer_line([row], model, created) if status == "ok" else error_line(row))
                elif rows := gathered.add(row):
                    for found, line in lines_of(rows, model, created):
                        lines[found].write(line)
        for rows in gathered.rest():
            for found, line in lines_of(rows, model, created):
                lines[found].write(line)
    return {FILES[status]: [written.num_lines, written.num_bytes] for status, written in lines.items()}


def has_batch_files(folder: RunFolder, state: RunState) -> bool:
    """Whether a finished run has its batch files, as long as they were written; True for other inputs."""
    if state["input"]["format"] != "openai_batch":
        return True
    written = state["answers"]
    sizes = {name: folder.filesystem.get_file_info(folder.path(name)).size for name in written}
    return sizes == {name: num_bytes for name, (_, num_bytes) in written.items()}


def count_lines(folder: RunFolder, name: str) -> int:
    """0 where there is no such file."""
    if folder.filesystem.get_file_info(folder.path(name)).type != pafs.FileType.File:
        return 0
    with folder.filesystem.open_input_stream(folder.path(name)) as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def _rows(folder: RunFolder, status: str, samples: int) -> Iterator[AnswerRow]:
    for path in folder.data_files(status):
        with pq.ParquetFile(path, filesystem=folder.filesystem) as file:
            names = file.schema_arrow.names
            own = [name for name in ("url", CHOICE) if name in names]
            wanted = [*COLUMNS, *own, *(SOURCES if SOURCE_ID in names else ())]
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted):
                for row in batch.to_pylist():
                    url = row.pop("url", None)
                    row["is_chat"] = url == CHAT_URL
                    if SOURCE_ID in row:
                        line = {"method": row.pop("method"), "url": url, "body": row.pop("body")}
                        row["samples"] = 1 if row["id"] == row[SOURCE_ID] else _samples(line, samples)
                    yield row


def _samples(line: dict[str, str | None], samples: int) -> int:
    """Rows that a line became, as the reader of lines counts them; NOT_KNOWN where nothing of it could be kept."""
    if line["body"] is None:
        return NOT_KNOWN
    try:
        check_target(line, line["url"] == CHAT_URL)
        return line_samples(json.loads(line["body"])) or samples
    except RowError:
        return samples
