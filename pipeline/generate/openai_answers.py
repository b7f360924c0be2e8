"""Answers to OpenAI batch lines: the bodies that the batch API writes, and the samples of a line put together.

A line that asked for several answers has a row for each of them, which may lie in several data files; what is held of
unfinished lines goes to temporary files beyond HELD_BYTES. Left out: reading and writing the files (`openai_batch`).
"""

import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Final, NotRequired, TypedDict

from pipeline.formatting import Json
from pipeline.schema import DUPLICATE_ID

HELD_BYTES: Final = 256 << 20
NUM_PARTS: Final = 64  # temporary files: each is in memory at a time
NOT_KNOWN: Final = 0
"""Samples of a line of which nothing could be kept, so that all of them have failed."""


class AnswerRow(TypedDict):
    """What of an output row its answer needs."""

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
    samples: NotRequired[int]
    """Rows that its line became, or NOT_KNOWN."""


def answer_line(rows: Sequence[AnswerRow], model: str, created: int) -> dict[str, Json]:
    """A line of the output file: the samples of one line of the input, in order. `created`: seconds since 1970."""
    first, is_chat = rows[0], rows[0].get("is_chat", False)
    own = first.get("source_id", first["id"])
    read, made = first["num_input_tokens"], sum(row["num_generated_tokens"] for row in rows)
    choices: list[Json] = [_choice(row, index, is_chat) for index, row in enumerate(rows)]
    body: dict[str, Json] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{own}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made},
    }
    response: dict[str, Json] = {"status_code": 200, "request_id": f"req-{own}", "body": body}
    return {"id": f"batch_req_{own}", "custom_id": own, "response": response, "error": None}


def _choice(row: AnswerRow, index: int, is_chat: bool) -> dict[str, Json]:
    text, logprobs = row["generated_text"], None
    if (choice := row.get("openai_choice")) is not None:
        part: dict[str, Json] = json.loads(choice)
        text, logprobs = str(part["text"]), part["logprobs"]
    said: dict[str, Json] = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": row["finish_reason"]}


def error_line(row: AnswerRow) -> dict[str, Json]:
    """A line of the errors file."""
    own = row.get("source_id", row["id"])
    error: dict[str, Json] = {"code": row["error_code"], "message": row["error_message"]}
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


class Gathered:
    """Rows on their way to the lines they belong to. A context: it has temporary files."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._held: dict[str, list[AnswerRow]] = {}
        self._num_bytes, self._most = 0, held_bytes
        self._parts: list[IO[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> "Gathered":
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
    """About what it takes as Python has it."""
    texts = row["generated_text"], row["error_message"], row.get("openai_choice") or ""
    return 500 + sum(map(len, texts))
