"""`/v1/batches` by the openai client and by bad requests, without Ray: nobody runs the batches here.

What a batch is at each moment is given by the files that a run leaves behind.
"""

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.batches.driver import find_errors, run_batch
from pipeline.batches.ending import end_batch
from pipeline.batches.run_config import job_config
from pipeline.batches.status import BatchView, status_of
from pipeline.batches.storage import ClientStorage, StoredBatch
from pipeline.config.job import ConfigError
from tests.support.batch_helpers import (
    KEY,
    OTHER_KEY,
    SESSION,
    answers_of,
    batch_endpoint,
    begin_run,
    client_of,
    jsonl,
    line,
    storage_of,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    prices = {"price_per_hour": 3600.0}
    with batch_endpoint(tmp_path / "storage", batches={"max_waiting": 3, "actors": prices}) as running:
        yield running


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return client_of(url)


@pytest.fixture
def own(tmp_path: Path) -> ClientStorage:
    return storage_of(tmp_path / "storage")


def create(client: openai.OpenAI, lines: list[Any] | None = None, **keys: Any) -> Any:
    content = jsonl([line("a"), line("b")] if lines is None else lines)
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    given: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"} | keys
    return client.batches.create(input_file_id=made.id, **given)


def record_of(own: ClientStorage, batch_id: str) -> StoredBatch:
    record = own.batch(batch_id)
    assert record is not None
    return record


def code_of(error: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    body: Any = error.response.json()["error"]
    return error.status_code, body["code"], body["param"]


def add_rows(own: ClientStorage, batch_id: str, status: str, ids: list[str], number: int = 0, **more: Any) -> None:
    rows = [
        {
            "id": one, "generated_text": f"text of {one}", "num_input_tokens": 1, "num_generated_tokens": 2,
            "finish_reason": "stop", "error_code": "" if status == "ok" else "bad_line",
            "error_message": "" if status == "ok" else "it is bad", "url": "/v1/completions",
        } | {name: values[index] for name, values in more.items()}
        for index, one in enumerate(ids)
    ]  # fmt: skip
    folder = Path(own.run(batch_id).path(f"data/status={status}"))
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"part-{SESSION}-0a0b0c-{number}-0-88888888.parquet")


def test_a_batch_is_there_as_it_was_asked_for(client: openai.OpenAI) -> None:
    made = create(client, metadata={"corpus": "x"}, completion_window="90m")
    assert (made.status, made.endpoint, made.completion_window) == ("validating", "/v1/completions", "90m")
    assert (made.metadata, made.model, made.errors, made.usage) == ({"corpus": "x"}, "tiny", None, None)
    assert made.expires_at == made.created_at + 90 * 60
    assert made.output_file_id is made.error_file_id is made.in_progress_at is None
    assert made.request_counts.total == 0
    assert client.batches.retrieve(made.id) == made
    client.files.delete(made.input_file_id)  # the batch has its input still
    assert client.batches.retrieve(made.id) == made


def test_lists_have_pages_and_clients_see_their_own(client: openai.OpenAI, url: str) -> None:
    made = {create(client).id for _ in range(3)}
    assert {one.id for one in client.batches.list(limit=2)} == made
    first = client.batches.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    other = client_of(url, OTHER_KEY)
    assert list(other.batches.list()) == []
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(first.data[0].id)
        assert code_of(caught.value) == (404, "batch_not_found", "batch_id")
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"after": "batch_0"}):
        assert httpx.get(f"{url}/v1/batches", params=query, headers=HEADERS).status_code == 400


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_bad_requests(client: openai.OpenAI, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **keys)
    assert code_of(caught.value) == (400, "invalid_value", param)
    assert list(client.batches.list()) == []


def test_bad_bodies(url: str) -> None:
    for body, status in ((b"{", 400), (b"[]", 400), (b"{}", 400), (b"x" * 70_000, 413)):
        answer = httpx.post(f"{url}/v1/batches", content=body, headers=HEADERS)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_a_file_that_is_not_there(client: openai.OpenAI) -> None:
    made = client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    client.files.delete(made.id)
    for name in (made.id, "file-nonsense", "../../etc/passwd"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(input_file_id=name, endpoint="/v1/completions", completion_window="24h")
        assert code_of(caught.value) == (400, "file_not_found", "input_file_id")


def test_what_a_batch_made_is_no_input_of_another(client: openai.OpenAI, own: ClientStorage) -> None:
    made = create(client)
    end_batch(own, record_of(own, made.id), "expired", print)
    errors = client.batches.retrieve(made.id).error_file_id
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'") as caught:
        client.batches.create(input_file_id=errors, endpoint="/v1/completions", completion_window="24h")
    assert code_of(caught.value) == (400, "invalid_value", "input_file_id")


def test_an_idempotency_key_makes_one_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    asked: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    once = {"Idempotency-Key": "once"}
    made = client.batches.create(**asked, extra_headers=once)
    client.files.delete(file.id)  # the repeated request needs it no more
    assert client.batches.create(**asked, extra_headers=once) == made
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.create(**asked | {"completion_window": "1h"}, extra_headers=once)
    assert code_of(caught.value) == (409, "idempotency_key_reused", "Idempotency-Key")
    assert list(client.batches.list()) == [made]


def test_an_idempotency_key_whose_request_was_cut_off_takes_the_input_of_the_next_one(
    client: openai.OpenAI, own: ClientStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full behind the input's link, or what was to be deleted is there still."""
    old, new = (client.files.create(file=("in.jsonl", jsonl([line(one)])), purpose="batch") for one in ("old", "new"))
    asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h", "extra_headers": {"Idempotency-Key": "x"}}

    def cut_off(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ClientStorage, "_write", cut_off)
        patch.setattr(ClientStorage, "_remove_left", lambda *_: None)  # a kill removes nothing
        with pytest.raises(openai.InternalServerError):
            client.batches.create(input_file_id=old.id, **asked)
    made = client.batches.create(input_file_id=new.id, **asked)
    assert Path(own.input_path(made.id)).read_bytes() == jsonl([line("new")])
    end_batch(own, record_of(own, made.id), "cancelled", print)
    Path(own.input_path(made.id)).with_suffix(".json").unlink()
    assert client.batches.create(input_file_id=new.id, **asked).status == "validating"


def test_of_two_requests_at_once_with_one_idempotency_key_one_is_taken(
    client: openai.OpenAI, own: ClientStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [client.files.create(file=("in.jsonl", jsonl([line(f"r{n}")])), purpose="batch") for n in range(4)]
    add_batch = ClientStorage.add_batch
    monkeypatch.setattr(ClientStorage, "add_batch", lambda *given: (time.sleep(0.1), add_batch(*given))[1])
    made = list[Any]()

    def send(file: Any) -> None:
        asked: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        with suppress(openai.ConflictError):
            made.append(client.batches.create(**asked, extra_headers={"Idempotency-Key": "once"}))

    threads = [threading.Thread(target=send, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one,) = made
    assert client.batches.retrieve(one.id) == one
    assert Path(own.input_path(one.id)).read_bytes() == client.files.content(one.input_file_id).content


def test_a_batch_that_ends_while_its_driver_plans_stays_as_it_ended(
    client: openai.OpenAI, own: ClientStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = create(client), list[str]()

    def plan(*_: Any, **__: Any) -> Any:
        end_batch(own, record_of(own, made.id), "expired", print)
        return SimpleNamespace(folder=own.run(made.id), earlier=None)

    monkeypatch.setattr("pipeline.generate.run.plan_run", plan)
    run_batch(own, record_of(own, made.id), said.append)
    assert said == ["output.path: the batch has ended"]
    seen = client.batches.retrieve(made.id)
    assert (seen.status, len(answers_of(client, seen)[1]), own.run(made.id).read_state()) == ("expired", 2, None)


def test_a_sweep_waits_for_a_batch_whose_record_is_not_there_yet(
    client: openai.OpenAI, own: ClientStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    write, sweep = ClientStorage._write, threading.Thread(target=lambda: own.sweep(time.time() + 3600))

    def slowly(*given: Any) -> None:
        sweep.start()
        sweep.join(0.5)
        write(*given)

    monkeypatch.setattr(ClientStorage, "_write", slowly)
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    sweep.join()
    assert Path(own.input_path(made.id)).read_bytes() == jsonl([line("a")])


@pytest.mark.parametrize(
    ("key", "cause", "status"),
    [
        ("input.path", OSError("timed out"), "validating"),
        ("input.path", None, "failed"),
        ("model.source", None, "validating"),
        ("model.files", None, "failed"),
    ],
)
def test_a_disk_that_does_not_answer_is_not_the_fault_of_the_batch(
    client: openai.OpenAI,
    own: ClientStorage,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    cause: OSError | None,
    status: str,
) -> None:
    made = create(client)

    def refused(*_: Any) -> None:
        raise ConfigError(key, "cannot be read") from cause

    monkeypatch.setattr("pipeline.batches.driver.run", refused)
    run_batch(own, record_of(own, made.id), print)
    assert client.batches.retrieve(made.id).status == status
    assert not Path(own.run_path(made.id), "batch_output.jsonl").exists()


def test_a_client_has_so_many_batches_at_a_time(client: openai.OpenAI, url: str, own: ClientStorage) -> None:
    made = [create(client).id for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        create(client)
    assert caught.value.response.headers["retry-after"]
    create(client_of(url, OTHER_KEY))
    end_batch(own, record_of(own, made[0]), "cancelled", print)
    create(client)


STATE: Any = {"state": "running", "books": {"input": 5}}
EXPIRED: Any = {"status": "expired"}


@pytest.mark.parametrize(
    ("ending", "state", "is_cancelled", "rows", "status"),
    [
        (None, None, False, 0, "validating"),
        (None, STATE, False, 4, "in_progress"),
        (None, STATE, False, 5, "finalizing"),
        (None, STATE | {"state": "interrupted"}, False, 4, "in_progress"),
        (None, STATE | {"state": "finished"}, False, 5, "completed"),
        (None, None, True, 0, "cancelling"),
        (None, STATE, True, 5, "cancelling"),
        (None, STATE | {"state": "finished"}, True, 5, "completed"),
        (EXPIRED, STATE, True, 5, "expired"),
    ],
)
def test_states(ending: Any, state: Any, is_cancelled: bool, rows: int, status: str) -> None:
    assert status_of(ending, state, is_cancelled, lambda: rows) == status


def test_progress_is_what_the_data_files_hold(client: openai.OpenAI, own: ClientStorage) -> None:
    """With several answers to a line, lines count by the share of answers that are there."""
    made = create(client, [line(f"r{n}") for n in range(6)])
    begin_run(own, made.id, documents=6, rows=12)
    add_rows(own, made.id, "ok", ["r0-0", "r0-1", "r1-0"])
    add_rows(own, made.id, "failed", ["r2-0", "r2-1"])
    seen = client.batches.retrieve(made.id)
    assert (seen.status, seen.in_progress_at is not None) == ("in_progress", True)
    assert seen.request_counts.model_dump() == {"total": 6, "completed": 1, "failed": 1}
    assert (9 < seen.duration_s < 11, 9 < seen.cost < 11) == (True, True)
    add_rows(own, made.id, "ok", [f"r{n}-{k}" for n in range(3, 7) for k in (0, 1)][:7], number=1)
    assert client.batches.retrieve(made.id).status == "finalizing"


def test_an_expired_batch_keeps_its_rows_and_names_the_others(client: openai.OpenAI, own: ClientStorage) -> None:
    """Also lines without an id, and an id that is there twice: each line of the input is a line of one file."""
    lines = [line("a"), "no json", line("twice"), line("twice"), line("b", n=2, temperature=1), "", "not this either"]
    made = create(client, lines)
    name = f"{made.id}.jsonl"
    begin_run(own, made.id, documents=6, rows=7)
    bodies = {"source_id": ["a", "b"], "sample": [0, 0], "method": ["POST"] * 2, "body": ["{}", '{"n": 2}']}
    add_rows(own, made.id, "ok", ["a", "b-0"], **bodies)  # the second answer of b is missing
    bodies = {"source_id": [f"{name}:1", "twice"], "sample": [0, 0], "method": [None, "POST"], "body": [None, "{}"]}
    add_rows(own, made.id, "failed", [f"{name}:1", "twice"], **bodies)
    end_batch(own, record_of(own, made.id), "expired", print)
    seen = client.batches.retrieve(made.id)
    assert (seen.status, seen.expired_at is not None) == ("expired", True)
    assert seen.request_counts.model_dump() == {"total": 6, "completed": 1, "failed": 5}
    output, errors = answers_of(client, seen)
    assert output.keys() == {"a"}
    codes = sorted((error["custom_id"], error["code"]) for error in errors)
    assert codes == [
        ("b", "batch_expired"), (f"{name}:1", "bad_line"), (f"{name}:6", "batch_expired"),
        ("twice", "bad_line"), ("twice", "batch_expired"),
    ]  # fmt: skip
    end_batch(own, record_of(own, made.id), "cancelled", print)  # too late
    assert client.batches.retrieve(made.id) == seen


def test_a_batch_that_never_began_expires_too(client: openai.OpenAI, own: ClientStorage) -> None:
    """Each line is one of the errors file, also with an id that is there three times, or that has line ends in it."""
    ids = ["a", "a", "a", "b\u2028c\x85d\u2029\n", "e"]
    made = create(client, [line(one) for one in ids])
    end_batch(own, record_of(own, made.id), "expired", print)
    seen = client.batches.retrieve(made.id)
    assert (seen.status, seen.output_file_id) == ("expired", None)
    assert seen.request_counts.model_dump() == {"total": 5, "completed": 0, "failed": 5}
    found = answers_of(client, seen)[1]
    assert [(error["code"], error["custom_id"]) for error in found] == [("batch_expired", one) for one in ids]


ENCODED = jsonl([line("a"), line("b")])


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        (b"\xef\xbb\xbf" + ENCODED, ["a", "b"]),
        (ENCODED.replace(b"\n", b"\r\n"), ["a", "b"]),
        (b"\n \t\n" + ENCODED.replace(b"\n", b"\n\r\n"), ["a", "b"]),
        (ENCODED.removesuffix(b"\n"), ["a", "b"]),
        (ENCODED.decode().encode("utf-16"), [":0", ":1", ":2"]),
        (b'{"custom_id": "h", "body": "' + b"x" * 5_000_000 + b'"}\n' + ENCODED, [":0", "a", "b"]),
        (b'[]\n"text"\n{"custom_id": 5}\n{"custom_id": "\\ud800"}\n\0\n\xff', [f":{n}" for n in range(6)]),
        (b"[" * 200_000 + b"\n" + ENCODED, [":0", "a", "b"]),
    ],
    ids=["mark", "crlf", "blank", "open end", "utf16", "huge", "no requests", "deep"],
)
def test_whatever_a_file_holds_each_line_has_its_place(
    client: openai.OpenAI, own: ClientStorage, content: bytes, ids: list[str]
) -> None:
    """Nothing of it stops the batch, and a line without an id of its own is named by its number."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    record = record_of(own, made.id)
    assert list(find_errors(own, record)) == []
    end_batch(own, record, "expired", print)
    errors = answers_of(client, client.batches.retrieve(made.id))[1]
    assert [error["custom_id"].removeprefix(f"{made.id}.jsonl") for error in errors] == ids


@pytest.mark.parametrize("content", [b"\n", b" \n\t\r\n", b"\xef\xbb\xbf"])
def test_a_file_without_lines_fails(client: openai.OpenAI, own: ClientStorage, content: bytes) -> None:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    run_batch(own, record_of(own, made.id), print)
    failed = client.batches.retrieve(made.id)
    assert (failed.status, [error.code for error in failed.errors.data]) == ("failed", ["empty_file"])


def test_cancelling(client: openai.OpenAI, own: ClientStorage) -> None:
    made = create(client)
    begin_run(own, made.id, documents=2)
    add_rows(own, made.id, "ok", ["a"])
    seen = client.batches.cancel(made.id)
    assert (seen.status, seen.cancelling_at is not None) == ("cancelling", True)
    assert client.batches.cancel(made.id) == seen
    end_batch(own, record_of(own, made.id), "cancelled", print)
    gone = client.batches.cancel(made.id)
    assert (gone.status, gone.error_file_id) == ("cancelled", None)
    assert answers_of(client, gone)[0].keys() == {"a"}


def test_a_finished_run_is_completed_whatever_comes_later(client: openai.OpenAI, own: ClientStorage) -> None:
    made = create(client)
    answers = {"batch_output.jsonl": {"lines": 2}, "batch_errors.jsonl": {"lines": 0}}
    report = {"total_input_tokens": 7, "total_output_tokens": 9}
    begin_run(own, made.id, documents=2, state="finished", answers=answers, report=report)
    own.run(made.id).write_text("batch_output.jsonl", '{"a": 1}\n')
    own.run(made.id).write_text("batch_errors.jsonl", "")
    own.cancel(made.id, 1)
    end_batch(own, record_of(own, made.id), "cancelled", print)
    seen = client.batches.retrieve(made.id)
    assert (seen.status, seen.usage.total_tokens, seen.error_file_id) == ("completed", 16, None)
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(made.id)
    assert code_of(caught.value)[:2] == (409, "batch_has_ended")
    (output,) = [file for file in client.files.list() if file.purpose == "batch_output"]
    assert (output.id, output.bytes) == (seen.output_file_id, 9)
    assert client.files.content(output.id).text == '{"a": 1}\n'
    client.files.delete(output.id)
    assert client.batches.retrieve(made.id).output_file_id is None
    with pytest.raises(openai.NotFoundError):
        client.files.content(output.id)


@pytest.mark.parametrize(
    ("keys", "age_s"),
    [({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 3600), ({}, 30 * 24 * 3600)],
    ids=["as asked for", "with the batch"],
)
def test_results_say_how_long_they_are_there(
    client: openai.OpenAI, own: ClientStorage, monkeypatch: Any, keys: Any, age_s: int
) -> None:
    made = create(client, **keys)
    end_batch(own, record_of(own, made.id), "expired", print)
    file = client.files.retrieve(client.batches.retrieve(made.id).error_file_id)
    assert file.expires_at == file.created_at + age_s
    later = time.time() + age_s + 1
    monkeypatch.setattr("pipeline.batches.status.time.time", lambda: later)
    assert BatchView(own, record_of(own, made.id)).result_file("errors") is None


def test_the_run_of_a_batch_is_that_of_the_server(client: openai.OpenAI, own: ClientStorage) -> None:
    """Kept with the batch: a server with another configuration does not change it."""
    config = job_config(own, record_of(own, create(client).id), 60.0)
    assert (config.actors.background, config.baseline.fraction, config.limits.max_failed_rows) == (True, 0.0, 1.0)
    assert (config.limits.window_s, config.output.if_exists, config.input.format) == (60.0, "resume", "openai_batch")
    assert config.sampling.max_new_tokens == 16
