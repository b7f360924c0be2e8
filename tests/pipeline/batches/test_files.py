"""`/v1/files` by the openai client and by bad requests, without Ray."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx2 as httpx
import openai
import pytest

from pipeline.batches.storage import ClientStorage
from pipeline.service.uploads import read_form
from tests.support.batch_helpers import KEY, OTHER_KEY, batch_endpoint, client_of, jsonl, line, storage_of

CONTENT = jsonl([line("a"), line("b")])
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    limits = {"max_file_bytes": 5000, "max_lines": 20, "max_stored_bytes": 12_000}
    with batch_endpoint(tmp_path / "storage", storage=limits) as running:
        yield running


def code_of(error: openai.APIStatusError) -> tuple[int, str | None]:
    body: Any = error.response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    return error.status_code, body["code"]


def upload(client: openai.OpenAI, content: bytes = CONTENT, **keys: Any) -> Any:
    return client.files.create(file=("in.jsonl", content), purpose="batch", **keys)


def test_a_file_comes_back_and_goes(url: str) -> None:
    client = client_of(url)
    made = upload(client)
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(CONTENT), "in.jsonl", "batch", "processed")
    assert made.expires_at - made.created_at == 30 * 24 * 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == CONTENT
    assert list(client.files.list()) == [made]
    assert client.files.delete(made.id).deleted
    assert list(client.files.list()) == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert code_of(caught.value) == (404, "file_not_found")


def test_lists_have_pages(url: str) -> None:
    client = client_of(url)
    made = {upload(client, b"1\n" * (number + 1)).id for number in range(5)}
    assert {one.id for one in client.files.list(limit=2)} == made  # the client asks for the next page
    first = httpx.get(f"{url}/v1/files", params={"limit": 2}, headers=HEADERS).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    assert list(client.files.list(purpose="batch_output")) == []
    assert {one.id for one in client.files.list(order="asc")} == made
    for query in ({"order": "up"}, {"limit": 0}, {"limit": 10_001}, {"limit": "1" * 5000}, {"after": "file-0"}):
        assert httpx.get(f"{url}/v1/files", params=query, headers=HEADERS).status_code == 400


def test_another_key_sees_nothing_of_it(url: str) -> None:
    made, other = upload(client_of(url)), client_of(url, OTHER_KEY)
    assert list(other.files.list()) == []
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        other.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert code_of(caught.value) == (400, "file_not_found")
    assert client_of(url).files.content(made.id).content == CONTENT
    with pytest.raises(openai.AuthenticationError):
        upload(client_of(url, "no-such-key"))


def test_an_upload_with_an_idempotency_key_is_stored_once(url: str) -> None:
    client, key = client_of(url), {"extra_headers": {"Idempotency-Key": "once"}}
    made = upload(client, **key)
    assert upload(client, **key) == made
    assert upload(client).id != made.id
    with pytest.raises(openai.ConflictError) as caught:
        upload(client, jsonl([line("other")]), **key)
    assert code_of(caught.value) == (409, "idempotency_key_reused")
    assert upload(client_of(url, OTHER_KEY), **key).id != made.id


def test_ages(url: str) -> None:
    client = client_of(url)
    made = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="seconds"):
        upload(client, expires_after={"anchor": "created_at", "seconds": 3})


def test_limits(url: str) -> None:
    client = client_of(url)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 5001)
    assert code_of(caught.value) == (413, "file_too_large")
    upload(client, b"1\n" * 19 + b"1")
    with pytest.raises(openai.BadRequestError) as bad:
        upload(client, b"1\n" * 20 + b"1")
    assert code_of(bad.value) == (400, "too_many_lines")
    stored = upload(client, b"x" * 5000)
    upload(client, b"x" * 5000)
    with pytest.raises(openai.BadRequestError) as full:
        upload(client, b"x" * 5000)
    assert code_of(full.value) == (400, "storage_limit_exceeded")
    upload(client_of(url, OTHER_KEY), b"x" * 5000)  # has a limit of its own
    with pytest.raises(openai.BadRequestError) as full:  # its input counts again
        client.batches.create(input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h")
    assert code_of(full.value) == (400, "storage_limit_exceeded")


@pytest.mark.parametrize(
    ("fields", "file", "code", "param"),
    [
        ({"purpose": "fine-tune"}, CONTENT, "invalid_value", "purpose"),
        ({}, CONTENT, "invalid_value", "purpose"),
        ({"purpose": "batch"}, b"", "invalid_value", "file"),
        ({"purpose": "batch"}, None, "invalid_value", "file"),
        ({"purpose": "batch", "nonsense": "1"}, CONTENT, "invalid_value", "nonsense"),
        ({"purpose": "batch", "expires_after": "{}"}, CONTENT, "invalid_value", "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, CONTENT, "invalid_value", "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 4000},
            CONTENT,
            "invalid_value",
            "expires_after[seconds]",
        ),
        ({"purpose": "b" * 5000}, CONTENT, "invalid_form", None),
    ],
)
def test_bad_forms(url: str, fields: dict[str, str], file: bytes | None, code: str, param: str | None) -> None:
    parts: Any = {name: (None, value) for name, value in fields.items()}
    if file is not None:
        parts["file"] = ("../../in.jsonl", file)
    parts = parts or {"nothing": (None, "")}
    answer = httpx.post(f"{url}/v1/files", files=parts, headers=HEADERS)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "multipart/form-data; boundary=x"])
def test_what_is_no_form(url: str, content_type: str) -> None:
    headers = HEADERS | {"Content-Type": content_type}
    answer = httpx.post(f"{url}/v1/files", content=b"no form", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


def test_a_form_that_breaks_off_leaves_nothing(url: str, tmp_path: Path) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + CONTENT
    headers = HEADERS | {"Content-Type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{url}/v1/files", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "file-..", "file-" + 23 * "0", "file-" + 24 * "0" + ".json"]
)
def test_no_id_leads_outside(url: str, name: str) -> None:
    for path in (f"files/{name}", f"files/{name}/content", f"batches/{name}"):
        answer = httpx.get(f"{url}/v1/{path}", headers=HEADERS)
        assert answer.status_code == 404, path
        assert "error" in answer.json()


def test_large_files_go_to_disk_as_they_come(tmp_path: Path) -> None:
    """And two at a time do not disturb each other."""
    with batch_endpoint(tmp_path / "storage") as running:
        client, made = client_of(running), dict[int, Any]()
        contents = [bytes([97 + number]) * 999 + b"\n" for number in range(3)]

        def send(number: int) -> None:
            made[number] = upload(client, contents[number] * 20_000)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, content in enumerate(contents):
            assert client.files.content(made[number].id).content == content * 20_000


def test_a_form_is_read_alike_in_whatever_pieces_it_arrives() -> None:
    content = jsonl([line(f"row-{number}") for number in range(5000)])
    edge = b"--" + 24 * b"-" + b"0123456789abcdef"  # as long as clients' are
    parts = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="in.jsonl"\r\n\r\n' + content]
    form = (
        b"".join(edge + b"\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + edge + b"--\r\n"
    )
    content_type = f"multipart/form-data; boundary={edge[2:].decode()}"

    async def pieces(random: Random) -> AsyncIterator[bytes]:
        rest = form
        while rest:
            size = random.choice((1, 5, 17, 70, 262_144, 300_000))
            yield rest[:size]
            rest = rest[size:]
            if random.random() < 0.5:
                await asyncio.sleep(0)

    for seed in range(20):
        with SpooledTemporaryFile() as target:
            read = asyncio.run(read_form(pieces(Random(seed)), content_type, target, len(content), 5000))
            target.seek(0)
            assert target.read() == content
        assert read == ({"purpose": "batch"}, "in.jsonl", len(content), 5000)


def test_a_full_disk_stores_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ClientStorage, "add_file", full)
    with pytest.raises(openai.InternalServerError) as caught:
        upload(client_of(url))
    assert code_of(caught.value) == (507, "storage_full")
    assert storage_of(tmp_path / "storage").files() == []


def test_content_whose_record_cannot_be_written_does_not_stay(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ClientStorage, "_write", full)
    with pytest.raises(openai.InternalServerError):
        upload(client_of(url))
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def test_without_a_storage_there_are_no_files(tmp_path: Path) -> None:
    with batch_endpoint(tmp_path, storage={"path": None}) as running:
        with pytest.raises(openai.NotFoundError) as caught:
            client_of(running).files.list()
        assert code_of(caught.value) == (404, "no_storage")


@pytest.mark.parametrize(("method", "path"), [("PUT", "files"), ("DELETE", "batches/x"), ("GET", "batches/x/cancel")])
def test_methods_that_a_route_does_not_have(url: str, method: str, path: str) -> None:
    answer = httpx.request(method, f"{url}/v1/{path}", headers=HEADERS)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (405, "invalid_request_error", "method_not_supported")
