"""Writes the OpenAI batch files, `batch_output.jsonl` and `batch_errors.jsonl`, from the finished data files.

They are part of a finished run: `run.json` records their lengths, and a file of another length is written again. An
input line that asks for several answers has a row for each, possibly in several data files. Rows of incomplete lines
are moved to temporary files beyond HELD_BYTES.
"""

import hashlib
import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, BinaryIO, Final, NotRequired, TypeAlias, TypedDict

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.formatting import Json
from pipeline.input.line_reader import RowError
from pipeline.input.openai_rows import CHAT_URLS, requested_samples
from pipeline.schema import (
    CHOICE,
    DUPLICATE_ID,
    IS_VALID,
    NUM_REASONING_TOKENS,
    REASONING,
    REASONING_SCHEMA,
    SAMPLE,
    SOURCE_ID,
)
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import LinesRecord, RunState

Unanswered: TypeAlias = tuple[str, str, str]
"""A line without an answer: its id, and the code and message of its error."""
HELD_BYTES: Final = 256 << 20
NUM_PARTS: Final = 64  # temporary files: each is in memory at a time
NOT_KNOWN: Final = 0
"""The number of samples of a line whose body could not be kept, so that all of them have failed."""


class AnswerRow(TypedDict):
    """The columns of an output row that its answer is made of."""

    id: str
    generated_text: str
    num_input_tokens: int
    num_generated_tokens: int
    finish_reason: str
    error_code: str
    error_message: str
    source_id: NotRequired[str]
    sample: NotRequired[int]
    is_chat: NotRequired[bool]
    openai_choice: NotRequired[str | None]
    is_valid: NotRequired[bool | None]
    reasoning: NotRequired[str | None]
    num_reasoning_tokens: NotRequired[int]
    samples: NotRequired[int]
    """Rows that its line became, or NOT_KNOWN."""


def answer_line(rows: Sequence[AnswerRow], model: str, created: int) -> dict[str, Json]:
    """A line of the output file: the samples of one line of the input, in order. `created`: seconds since 1970."""
    first, is_chat = rows[0], rows[0].get("is_chat", False)
    own = first.get("source_id", first["id"])
    read, made = first["num_input_tokens"], sum(row["num_generated_tokens"] for row in rows)
    choices: list[Json] = [_choice(row, index, is_chat) for index, row in enumerate(rows)]
    usage: dict[str, Json] = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    if is_chat and NUM_REASONING_TOKENS in first:
        num_tokens = sum(row["num_reasoning_tokens"] for row in rows)
        usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
    body: dict[str, Json] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{own}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    response: dict[str, Json] = {"status_code": 200, "request_id": f"req-{own}", "body": body}
    return {"id": f"batch_req_{own}", "custom_id": own, "response": response, "error": None}


def _choice(row: AnswerRow, index: int, is_chat: bool) -> dict[str, Json]:
    part: dict[str, Json] = {
        "text": row["generated_text"],
        "logprobs": None,
        "is_valid": row.get("is_valid"),
        "finish_reason": row["finish_reason"],
    }
    if (choice := row.get("openai_choice")) is not None:
        part |= json.loads(choice)
    text, is_valid = part["text"], part["is_valid"]
    message: dict[str, Json] = {"role": "assistant", "content": text}
    if REASONING in row:
        message["reasoning_content"] = row["reasoning"]
    if "tool_calls" in part:
        message["tool_calls"] = part["tool_calls"]
    said: dict[str, Json] = {"message": message} if is_chat else {"text": text}
    said |= {"logprobs": part["logprobs"], "finish_reason": part["finish_reason"]}
    return {"index": index, **said} | ({} if is_valid is None else {"is_valid": is_valid})


def error_line(row: AnswerRow) -> dict[str, Json]:
    """A line of the errors file."""
    return _error_line(row.get("source_id", row["id"]), row["error_code"], row["error_message"])


def _error_line(own: str, code: str, message: str) -> dict[str, Json]:
    error: dict[str, Json] = {"code": code, "message": message}
    return {"id": f"batch_req_{own}", "custom_id": own, "response": None, "error": error}


def lines_of(rows: Sequence[AnswerRow], model: str, created: int) -> Iterator[tuple[str, dict[str, Json]]]:
    """Status and line for each line of the input that these rows come from: all rows of one `custom_id` and number of
    samples, of more than one line where the id is there twice."""
    num_lines = max(1, sum(row.get("sample", 0) == 0 for row in rows))
    own = sorted((row for row in rows if row["error_code"] != DUPLICATE_ID), key=lambda row: row.get("sample", 0))
    later = [row for row in rows if row["error_code"] == DUPLICATE_ID]
    is_whole = _is_whole(own)
    failed = [*(row for row in own if row["error_code"]), *later]
    if is_whole and not any(row["error_code"] for row in own):
        yield "ok", answer_line(own, model, created)
        num_lines, failed = num_lines - 1, later
    elif is_whole and later:
        yield "failed", error_line(failed[0])
        num_lines, failed = num_lines - 1, later
    assert failed or not num_lines, f"{own[0]['id']!r}: {len(own)} good rows are not all of its line"
    yield from (("failed", error_line(failed[min(number, len(failed) - 1)])) for number in range(num_lines))


def _is_whole(rows: Sequence[AnswerRow]) -> bool:
    """Whether all samples of a line are there; `rows` in their order."""
    return bool(rows) and [row.get("sample", 0) for row in rows] == list(range(rows[0].get("samples", 1)))


class AnswerCollector:
    """Collects rows until all samples of their line are there. A context manager, since it has temporary files."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._held: dict[str, list[AnswerRow]] = {}
        self._num_bytes, self._most = 0, held_bytes
        self._parts: list[IO[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> "AnswerCollector":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, row: AnswerRow) -> list[AnswerRow]:
        """All rows of a line, in order, once the last of them has come and none is in doubt; else none."""
        key = _key(row)
        rows = self._held.setdefault(key, [])
        rows.append(row)
        self._num_bytes += _size(row)
        if len(rows) == row.get("samples") and not any(row["error_code"] == DUPLICATE_ID for row in rows):
            rows.sort(key=lambda row: row.get("sample", 0))
            if _is_whole(rows):
                self._num_bytes -= sum(map(_size, rows))
                return self._held.pop(key)
        if self._num_bytes > self._most:
            self._spill()
        return []

    def rest(self) -> Iterator[list[AnswerRow]]:
        """The rows that `add` has not given, by lines."""
        if not self._parts:
            yield from self._held.values()
            return
        self._spill()
        for part in self._parts:
            part.seek(0)
            yield from _grouped(json.loads(line) for line in part).values()

    def _spill(self) -> None:
        if not self._parts:
            files = (tempfile.TemporaryFile() for _ in range(NUM_PARTS))  # noqa: SIM115 (the stack closes them)
            self._parts = [self._open.enter_context(file) for file in files]
        for key, rows in self._held.items():
            part = self._parts[zlib.crc32(key.encode("utf-8", "surrogatepass")) % NUM_PARTS]
            part.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        self._held, self._num_bytes = {}, 0


def _grouped(rows: Iterable[AnswerRow]) -> dict[str, list[AnswerRow]]:
    found: dict[str, list[AnswerRow]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    return found


def _key(row: AnswerRow) -> str:
    return f"{row.get('samples')} {row.get('source_id')}"


def _size(row: AnswerRow) -> int:
    """Approximate bytes of a row as a Python object."""
    texts = row["generated_text"], row["error_message"], row.get("openai_choice") or "", row.get("reasoning") or ""
    return 500 + sum(map(len, texts))


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
LINE_ENDS: Final = re.compile("[\x85\u2028\u2029]")
"""What ends a line for `str.splitlines`, and so for HTTP clients that go through an answer line by line, and what JSON
would leave as it is."""

FILES = {"ok": "batch_output.jsonl", "failed": "batch_errors.jsonl"}
"""Status of the lines -> file."""


class _LineWriter:
    """Writes JSON lines into a file, counts them, and takes their digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_lines = self._num_bytes = 0

    def write(self, line: dict[str, Json]) -> None:
        text = json.dumps(line, ensure_ascii=False)
        if not text.isascii():
            text = LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        data = text.encode() + b"\n"
        self._file.write(data)
        self._digest.update(data)
        self._num_lines, self._num_bytes = self._num_lines + 1, self._num_bytes + len(data)

    def record(self) -> LinesRecord:
        return {"lines": self._num_lines, "bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


def write_batch_files(
    folder: RunFolder,
    paths: Mapping[str, Sequence[str]],
    model: str,
    created: int,
    check: Callable[[], None] = lambda: None,
    samples: int = 1,
    rest: "Callable[[Counter[str]], Iterable[Unanswered]] | None" = None,
) -> dict[str, LinesRecord]:
    """A line for each line of the input: answers in `batch_output.jsonl`, failures, be it of one of its samples, in
    `batch_errors.jsonl`; each file appears when whole, and after `check`. Gives a record of each.

    `paths`: the data files by status; `created`: of all answers, in seconds since 1970; `samples`: of a line that does
    not say it. `rest`: where the run is not complete, so that lines may lack answers; it is given how many lines of
    each id were written, and gives those to add to the errors.
    """
    answered: Counter[str] = Counter()
    with (
        folder.replacing(FILES["failed"], check) as bad,
        folder.replacing(FILES["ok"], check) as good,
        AnswerCollector() as collector,
    ):
        lines = {"ok": _LineWriter(good), "failed": _LineWriter(bad)}

        def write(found: str, line: dict[str, Json]) -> None:
            lines[found].write(line)
            answered[str(line["custom_id"])] += 1

        for status in FILES:
            for row in _rows(folder, paths[status], samples):
                if row.get("samples", 1) == 1:
                    write(status, answer_line([row], model, created) if status == "ok" else error_line(row))
                elif rows := collector.add(row):
                    for found, line in lines_of(rows, model, created):
                        write(found, line)
        for rows in collector.rest():
            if rest is None or any(row["error_code"] for row in rows):
                for found, line in lines_of(rows, model, created):
                    write(found, line)
        for own, code, message in rest(answered) if rest is not None else ():
            lines["failed"].write(_error_line(own, code, message))  # no answer: an id may be there twice
    return {FILES[status]: written.record() for status, written in lines.items()}


def has_batch_files(folder: RunFolder, state: RunState) -> bool:
    """Whether a finished run has its batch files, as long as they were written; True for other inputs."""
    if state["input"]["format"] != "openai_batch":
        return True
    written = state["answers"]
    sizes = {name: folder.filesystem.get_file_info(folder.path(name)).size for name in written}
    return sizes == {name: record["bytes"] for name, record in written.items()}


def read_lines_record(folder: RunFolder, name: str) -> LinesRecord:
    """The record of a batch file as it is now; that of an empty file where there is none."""
    found: LinesRecord = {"lines": 0, "bytes": 0, "sha256": ""}
    digest = hashlib.sha256()
    if folder.filesystem.get_file_info(folder.path(name)).type == pafs.FileType.File:
        with folder.filesystem.open_input_stream(folder.path(name)) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                found["lines"] += chunk.count(b"\n")
                found["bytes"] += len(chunk)
    return {**found, "sha256": digest.hexdigest()}


def _rows(folder: RunFolder, paths: Sequence[str], samples: int) -> Iterator[AnswerRow]:
    for path in paths:
        with pq.ParquetFile(path, filesystem=folder.filesystem) as file:
            names = file.schema_arrow.names
            own = [name for name in ("url", CHOICE, IS_VALID, *REASONING_SCHEMA.names) if name in names]
            wanted = [*COLUMNS, *own, *(SOURCES if SOURCE_ID in names else ())]
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted):
                for row in batch.to_pylist():
                    url = row.pop("url", None)
                    row["is_chat"] = url in CHAT_URLS
                    if SOURCE_ID in row:
                        line = {"method": row.pop("method"), "url": url, "body": row.pop("body")}
                        row["samples"] = 1 if row["id"] == row[SOURCE_ID] else _samples(line, samples)
                    yield row


def _samples(line: dict[str, str | None], samples: int) -> int:
    """The number of rows of a line, as the reader counts them; NOT_KNOWN where its body could not be kept."""
    if line["body"] is None:
        return NOT_KNOWN
    try:
        return requested_samples(line, json.loads(line["body"])) or samples
    except RowError:
        return samples
