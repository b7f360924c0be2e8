"""The HTTP routes of OpenAI's files and batches, `/v1/files` and `/v1/batches`. No Ray: `pipeline.batches` runs them.

A client sees its own objects alone; those of others do not exist. Everything that touches the storage runs in a thread.
"""

import asyncio
import errno
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Any, Final, ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from pipeline.batches.config import BatchesSection, StorageSection
from pipeline.batches.requests import BatchRequest, ExpiresAfter, validated
from pipeline.batches.status import BatchView, file_object
from pipeline.batches.storage import (
    BATCH_ID,
    FILE_ID,
    RESULT_ID,
    ClientStorage,
    FileRecord,
    Storage,
    StoredBatch,
    keyed_id,
    new_id,
    request_digest,
)
from pipeline.formatting import Json
from pipeline.openai_format.parameters import BadParameter, cut
from pipeline.service.api_error import ApiError
from pipeline.service.config import ServeConfig
from pipeline.service.error_responses import reply
from pipeline.service.requests import parse_body
from pipeline.service.uploads import MEMORY_BYTES, Upload, read_form

UPLOADS_PER_CLIENT: Final = 4
MAX_UPLOADS: Final = 16
UPLOAD_TIMEOUT_S: Final = 900.0
BODY_BYTES: Final = 64 << 10
MAX_KEY_CHARS: Final = 255
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
RETRY_AFTER_S: Final = 10
MAX_DIGITS: Final = 9  # int() refuses thousands of them
ORDERS: Final = {"asc": 1, "desc": -1}

P = ParamSpec("P")
T = TypeVar("T")
Keyed = TypeVar("Keyed", FileRecord, StoredBatch)


class BatchRoutes:
    """One method per route.

    `job`: the configuration of batches (`job_settings`); `caller` gives the client of a request or refuses it; `refuse`
    refuses what changes something while the server stops.
    """

    def __init__(
        self,
        config: ServeConfig,
        job: Mapping[str, Any],
        caller: Callable[[Request], str],
        refuse: Callable[[], None],
    ) -> None:
        self._config, self._job, self._caller, self._refuse = config, dict(job), caller, refuse
        self._limits: StorageSection = config.storage
        self._batches: BatchesSection = config.batches
        self._storage = None if config.storage.path is None else Storage(config.storage.path)
        self._uploads: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By client: one request at a time adds something, so that an id is given once and the limits hold."""

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/files")(self.upload)
        app.get("/v1/files")(self.files)
        app.get("/v1/files/{file_id}")(self.file)
        app.get("/v1/files/{file_id}/content")(self.content)
        app.delete("/v1/files/{file_id}")(self.delete_file)
        app.post("/v1/batches")(self.create)
        app.get("/v1/batches")(self.list_batches)
        app.get("/v1/batches/{batch_id}")(self.batch)
        app.post("/v1/batches/{batch_id}/cancel")(self.cancel)

    # Files

    async def upload(self, request: Request) -> Response:
        client, own = self._client(request)
        self._refuse()
        if self._uploads[client] >= UPLOADS_PER_CLIENT or self._uploads.total() >= MAX_UPLOADS:
            raise ApiError.overloaded(f"{self._uploads[client]} files of yours are being uploaded", RETRY_AFTER_S)
        self._uploads[client] += 1
        try:
            with SpooledTemporaryFile(MEMORY_BYTES) as target:
                async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                    content_type = request.headers.get("content-type", "")
                    limits = self._limits.max_file_bytes, self._limits.max_lines
                    form = await read_form(request.stream(), content_type, target, *limits)
                async with self._turns[client]:
                    record = await _in_thread(self._add_file, own, client, request, form, target)
                return reply(file_object(record))
        except TimeoutError:
            message = f"the upload took longer than {UPLOAD_TIMEOUT_S:g} s"
            raise ApiError(408, message, kind="timeout_error", code="timeout") from None
        except OSError as error:  # of the temporary file
            raise _storage_error(error, f"in {gettempdir()}, through which uploads go") from error
        finally:
            self._uploads[client] -= 1

    def _add_file(
        self, own: ClientStorage, client: str, request: Request, form: Upload, target: SpooledTemporaryFile[bytes]
    ) -> FileRecord:
        now = int(time.time())
        if (purpose := form.fields.pop("purpose", None)) != "batch":
            raise BadParameter("purpose", f"must be 'batch', got {cut(repr(purpose))}")
        ages = {name: form.fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
        age_s = self._limits.expires_after_s
        if any(ages.values()):
            seconds = ages["seconds"] or ""
            try:
                asked = validated(ExpiresAfter, ages | {"seconds": int(seconds) if seconds.isdecimal() else seconds})
            except BadParameter as error:
                raise BadParameter(f"expires_after[{error.name}]", error.reason) from None
            age_s = min(age_s, asked.seconds)
        if form.fields:
            known = "file, purpose, expires_after[anchor], expires_after[seconds]"
            raise BadParameter(next(iter(form.fields)), f"is not known; there are {known}")
        if form.filename is None:
            raise BadParameter("file", "is missing")
        if not form.num_bytes:
            raise BadParameter("file", "is empty")
        record: FileRecord = {
            "id": new_id("file-"),
            "filename": form.filename[:255],
            "bytes": form.num_bytes,
            "lines": form.num_lines,
            "created_at": now,
            "expires_at": now + age_s,
        }
        if key := _idempotency_key(request):
            record["request"] = request_digest(form.filename, form.num_bytes, form.num_lines, _digest(target))
            record["id"] = keyed_id("file-", client, key, record["request"])
        with own.changing():
            return self._stored(own, record, target)

    def _stored(self, own: ClientStorage, record: FileRecord, target: SpooledTemporaryFile[bytes]) -> FileRecord:
        """Stores the file, or gives the one that is there since an earlier request with its `Idempotency-Key`."""
        if "request" in record:
            earlier = [one for one in own.files_of_key(record["id"]) if not _is_over(one, record["created_at"])]
            if (before := _same_request(earlier, record)) is not None:
                return before
        self._check_room(own, record["bytes"], "file")
        target.seek(0)
        own.add_file(record, target)
        return record

    def _check_room(self, own: ClientStorage, num_bytes: int, param: str) -> None:
        """ApiError if the client would store more than it may with so many bytes on top."""
        stored, limit = own.stored_bytes(), self._limits.max_stored_bytes
        if stored + num_bytes > limit:
            message = f"{stored} bytes are stored, and {limit} may be (storage.max_stored_bytes); delete files"
            raise ApiError(400, message, param=param, code="storage_limit_exceeded")

    async def files(self, request: Request) -> Response:
        _, own = self._client(request)
        order = request.query_params.get("order", "desc")
        if order not in ORDERS:
            raise BadParameter("order", f"must be 'asc' or 'desc', got {cut(repr(order))}")
        purpose = request.query_params.get("purpose")
        limit = _limit(request, 10_000, 10_000)

        def listed() -> list[dict[str, Json]]:
            now = int(time.time())
            found = [file_object(record) for record in own.files() if not _is_over(record, now)]
            for record in own.batches():
                view = BatchView(own, record)
                found += [made for kind in ("output", "errors") if (made := view.result_file(kind)) is not None]
            sign = ORDERS[order]
            return sorted(found, key=lambda one: (sign * int(str(one["created_at"])), str(one["id"])))

        found = [one for one in await _in_thread(listed) if purpose in (None, one["purpose"])]
        return reply(_page(found, request.query_params.get("after"), limit))

    async def file(self, request: Request, file_id: str) -> Response:
        _, own = self._client(request)
        return reply(await _in_thread(_file, own, file_id))

    async def content(self, request: Request, file_id: str) -> Response:
        _, own = self._client(request)

        def opened() -> StreamingResponse:
            _file(own, file_id)
            try:
                if found := RESULT_ID.fullmatch(file_id):
                    parts = own.result(f"batch_{found[1]}", found[2])
                else:
                    parts = own.content(file_id)
            except FileNotFoundError:  # deleted at this moment
                raise _no_file(file_id) from None
            return StreamingResponse(parts, media_type="application/jsonl")

        return await _in_thread(opened)

    async def delete_file(self, request: Request, file_id: str) -> Response:
        _, own = self._client(request)

        def delete() -> None:
            _file(own, file_id)
            if found := RESULT_ID.fullmatch(file_id):
                own.delete_result(f"batch_{found[1]}", found[2])
            else:
                own.delete_file(file_id)

        await _in_thread(delete)
        return reply({"id": file_id, "object": "file", "deleted": True})

    # Batches

    async def create(self, request: Request) -> Response:
        client, own = self._client(request)
        self._refuse()
        body, limit_s = bytearray(), self._config.limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_BYTES:
                        raise ApiError(413, f"the body has more than {BODY_BYTES} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError.timed_out(limit_s) from None
        values = parse_body(bytes(body))
        async with self._turns[client]:
            return reply(await _in_thread(self._create, own, client, values, _idempotency_key(request)))

    def _create(self, own: ClientStorage, client: str, values: Mapping[str, Json], key: str | None) -> dict[str, Json]:
        asked, now = BatchRequest.parse(values), int(time.time())
        age_s, expiry = self._limits.expires_after_s, asked.output_expires_after
        record: StoredBatch = {
            "id": new_id("batch_"),
            "created_at": now,
            "expires_at": now + asked.window_s,
            "input_file_id": asked.input_file_id,
            "endpoint": asked.endpoint,
            "completion_window": asked.completion_window,
            "metadata": asked.metadata,
            "output_expires_after_s": age_s if expiry is None else min(age_s, expiry.seconds),
            "model": self._config.served_name,
            "model_names": [self._config.served_name, self._config.model.source],
            "job": self._job,
        }
        if key:
            record["request"] = request_digest(dict(values))
            record["id"] = keyed_id("batch_", client, key, record["request"])
        with own.changing():
            return self._created(own, record)

    def _created(self, own: ClientStorage, record: StoredBatch) -> dict[str, Json]:
        """Creates the batch, or gives the one that is there since an earlier request with its `Idempotency-Key`."""
        if "request" in record:
            before = _same_request(own.batches_of_key(record["id"]), record)
            if before is not None:
                return BatchView(own, before).batch_object()
        file = own.file(record["input_file_id"])
        if RESULT_ID.fullmatch(record["input_file_id"]):
            raise BadParameter("input_file_id", "must be a file with the purpose 'batch', got one that a batch makes")
        if file is None or _is_over(file, record["created_at"]):
            message = f"the file {cut(repr(record['input_file_id']))} does not exist"
            raise ApiError(400, message, param="input_file_id", code="file_not_found")
        if (count := sum(not BatchView(own, other).has_ended for other in own.batches())) >= self._batches.max_waiting:
            message = f"{count} batches of yours have not ended (batches.max_waiting)"
            raise ApiError.overloaded(message, RETRY_AFTER_S)
        self._check_room(own, file["bytes"], "input_file_id")  # its results will be about as large again, or more
        try:
            made = own.add_batch(record)
        except FileNotFoundError:  # deleted at this moment
            message = f"the file {record['input_file_id']} does not exist"
            raise ApiError(400, message, param="input_file_id", code="file_not_found") from None
        return BatchView(own, made).batch_object()

    async def list_batches(self, request: Request) -> Response:
        _, own = self._client(request)
        after, limit = request.query_params.get("after"), _limit(request, 20, 100)

        def listed() -> dict[str, Json]:
            records = {record["id"]: record for record in own.batches()}
            page = _page([{"id": batch_id} for batch_id in records], after, limit)
            shown: Any = page["data"]
            return page | {"data": [BatchView(own, records[one["id"]]).batch_object() for one in shown]}

        return reply(await _in_thread(listed))

    async def batch(self, request: Request, batch_id: str) -> Response:
        _, own = self._client(request)
        return reply(await _in_thread(lambda: _batch(own, batch_id).batch_object()))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        _, own = self._client(request)

        def cancel() -> dict[str, Json]:
            view = _batch(own, batch_id)
            if view.has_ended and view.status != "cancelled":
                message = f"the batch {batch_id} is {view.status} and cannot be cancelled"
                raise ApiError(409, message, code="batch_has_ended")
            if not view.has_ended:
                own.cancel(batch_id, int(time.time()))
            return _batch(own, batch_id).batch_object()

        return reply(await _in_thread(cancel))

    def _client(self, request: Request) -> tuple[str, ClientStorage]:
        """The client's name and its storage; ApiError if it may not ask, or nothing is stored here."""
        client = self._caller(request)
        if self._storage is None:
            message = "this server keeps no files and runs no batches; set storage.path in its configuration"
            raise ApiError(404, message, code="no_storage")
        own = self._storage.of(client)
        return own.name, own


def _file(own: ClientStorage, file_id: str) -> dict[str, Json]:
    """The object of a file, be it uploaded or made; ApiError 404."""
    made: dict[str, Json] | None = None
    if found := RESULT_ID.fullmatch(file_id):
        if (record := own.batch(f"batch_{found[1]}")) is not None:
            made = BatchView(own, record).result_file(found[2])
    elif FILE_ID.fullmatch(file_id) and (uploaded := own.file(file_id)) is not None:
        made = None if _is_over(uploaded, int(time.time())) else file_object(uploaded)
    if made is None:
        raise _no_file(file_id)
    return made


def _no_file(file_id: str) -> ApiError:
    return ApiError(404, f"the file {cut(repr(file_id))} does not exist", param="id", code="file_not_found")


def _batch(own: ClientStorage, batch_id: str) -> BatchView:
    record = own.batch(batch_id) if BATCH_ID.fullmatch(batch_id) else None
    if record is None:
        message = f"the batch {cut(repr(batch_id))} does not exist"
        raise ApiError(404, message, param="batch_id", code="batch_not_found")
    return BatchView(own, record)


def _is_over(record: FileRecord, now: int) -> bool:
    return now >= record["expires_at"]


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
        raise BadParameter("Idempotency-Key", f"must have 1 to {MAX_KEY_CHARS} characters")
    return key


def _same_request(earlier: Sequence[Keyed], now: Keyed) -> Keyed | None:
    """What was made of the same request before, given all that its `Idempotency-Key` came with; ApiError if that were
    other requests alone."""
    for one in earlier:
        if one["request"] == now["request"]:
            return one
    if earlier:
        message = "this Idempotency-Key came with another request before"
        raise ApiError(409, message, param="Idempotency-Key", code="idempotency_key_reused")
    return None


def _digest(file: SpooledTemporaryFile[bytes]) -> str:
    total = hashlib.sha256()
    file.seek(0)
    while part := file.read(1 << 20):
        total.update(part)
    return total.hexdigest()


def _limit(request: Request, usual: int, most: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not text.isdecimal() or len(text) > MAX_DIGITS or not 1 <= int(text) <= most:
        raise BadParameter("limit", f"must be an integer from 1 to {most}, got {cut(text)}")
    return int(text)


def _page(found: list[dict[str, Json]], after: str | None, limit: int) -> dict[str, Json]:
    """OpenAI's list of what comes behind the id `after`."""
    if after is not None:
        ids = [one["id"] for one in found]
        if after not in ids:
            raise BadParameter("after", f"is no id of this list: {cut(after)}")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    ends: dict[str, Json] = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    return {"object": "list", "data": list[Json](page), **ends, "has_more": len(found) > limit}


async def _in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that waits for disks; ApiError for what is wrong with the storage."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except OSError as error:
        raise _storage_error(error) from error


def _storage_error(error: OSError, place: str = "where files and batches are kept (storage.path)") -> ApiError:
    if error.errno in DISK_FULL:
        message = f"no space is left {place}; nothing was changed. Delete files, or try again when there is space"
        return ApiError(507, message, kind="server_error", code="storage_full")
    return ApiError.unavailable(f"the storage does not answer: {type(error).__name__}", "storage_failed")
