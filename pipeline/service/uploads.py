"""Reads an uploaded form (`multipart/form-data`) as it arrives: fields into memory, the file to disk, both limited."""

import asyncio
from collections.abc import AsyncIterator
from tempfile import SpooledTemporaryFile
from typing import Final, NamedTuple

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.base_protocol import BaseProtocol

from pipeline.service.api_error import ApiError

AHEAD_BYTES: Final = 1 << 20  # of the body, read before the form is
FIELD_BYTES: Final = 4096
MAX_PARTS: Final = 16
MEMORY_BYTES: Final = 1 << 20
PART_BYTES: Final = 1 << 18


class Upload(NamedTuple):
    fields: dict[str, str]
    filename: str | None
    """None: the form has no file."""
    num_bytes: int
    num_lines: int
    """Lines of the file; the last one need not end in a line break."""


class _Pace(BaseProtocol):
    """Tells the sender to wait while enough of the body has been read ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.may_send = asyncio.Event()
        self.may_send.set()

    @property
    def connected(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.may_send.clear()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self.may_send.set()


async def read_form(
    body: AsyncIterator[bytes],
    content_type: str,
    target: SpooledTemporaryFile[bytes],
    max_bytes: int,
    max_lines: int,
) -> Upload:
    """Reads the form in `body`, and writes its field `file` into `target`. ApiError 400 if it is no form or has too
    many lines, 413 if the file is too large."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise _bad_form(f"content-type must be multipart/form-data, got {content_type[:80]!r}")
    loop = asyncio.get_running_loop()
    pace = _Pace(loop)
    stream = StreamReader(pace, AHEAD_BYTES, loop=loop)

    async def feed() -> None:
        try:
            async for part in body:
                stream.feed_data(part)
                await pace.may_send.wait()
        except BaseException as error:
            stream.set_exception(error)
            raise
        stream.feed_eof()

    feeding = asyncio.ensure_future(feed())
    try:
        form = MultipartReader({"Content-Type": content_type}, stream)
        return await _read_parts(form, target, max_bytes, max_lines)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise _bad_form(f"the form cannot be read: {error}") from error
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])
        if not feeding.cancelled():
            feeding.exception()  # it was seen by the reader


async def _read_parts(
    form: MultipartReader, target: SpooledTemporaryFile[bytes], max_bytes: int, max_lines: int
) -> Upload:
    fields: dict[str, str] = {}
    filename: str | None = None
    num_bytes = num_lines = num_parts = 0
    last = b"\n"
    while (part := await form.next()) is not None:
        num_parts += 1
        if not isinstance(part, BodyPartReader) or num_parts > MAX_PARTS:
            raise _bad_form(f"the form must have at most {MAX_PARTS} parts, and no forms in it")
        if part.name != "file":
            text = bytearray()
            while piece := await part.read_chunk():
                text += piece
                if len(text) > FIELD_BYTES:
                    raise _bad_form(f"the field {part.name!r:.80} has more than {FIELD_BYTES} bytes")
            fields[part.name or ""] = text.decode("utf-8", "replace")
            continue
        if filename is not None:
            raise _bad_form("the form has more than one file")
        filename = part.filename or "file.jsonl"
        while piece := await part.read_chunk(PART_BYTES):
            num_bytes += len(piece)
            num_lines += piece.count(b"\n")
            if num_bytes > max_bytes:
                message = f"the file has more than {max_bytes} bytes (storage.max_file_bytes)"
                raise ApiError(413, message, param="file", code="file_too_large")
            if num_lines > max_lines:
                raise _too_many_lines(max_lines)
            last = piece[-1:]
            await asyncio.to_thread(target.write, piece)
    num_lines += last != b"\n"
    if num_lines > max_lines:
        raise _too_many_lines(max_lines)
    return Upload(fields, filename, num_bytes, num_lines)


def _bad_form(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")


def _too_many_lines(limit: int) -> ApiError:
    message = f"the file has more than {limit} lines (storage.max_lines)"
    return ApiError(400, message, param="file", code="too_many_lines")
