"""Two replicas on a store that has no locks, and takes the last writer's object: both get the same request at once.

The store is a folder that is not treated as a disk. Each replica is a server of its own, without Ray.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pyarrow.fs as pafs
import pytest

from pipeline.batches.ending import end_batch
from pipeline.batches.storage import BESIDE, LEFT_S, ClientStorage, keyed_id
from pipeline.store.run_folder import RunFolder
from tests.support.batch_helpers import batch_endpoint, begin_run, client_of, jsonl, line, storage_of

ONCE: Any = {"extra_headers": {"Idempotency-Key": "once"}}


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[openai.OpenAI]]:
    """One for each replica; both have the same key."""
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    monkeypatch.setattr(RunFolder, "open", lambda _: RunFolder(store, "storage", "store://storage"))
    monkeypatch.setattr("pipeline.store.lease.TAKEOVER_WAIT_S", 0.0)
    with ExitStack() as stack:
        yield [client_of(stack.enter_context(batch_endpoint(tmp_path))) for _ in range(2)]


def at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whoever stores something waits for the other, so that neither has seen what the other stores."""
    method, both = getattr(ClientStorage, name), threading.Barrier(2)
    monkeypatch.setattr(ClientStorage, name, lambda *given: (both.wait(30), method(*given))[1])


def sent(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def upload(client: openai.OpenAI, *names: str) -> Any:
    content = jsonl([line(one) for one in names])
    return client.files.create(file=("in.jsonl", content), purpose="batch", **ONCE)


def create(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", **ONCE)


def test_the_same_upload_is_one_file(clients: list[openai.OpenAI], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, "add_file")
    made = sent(*(lambda client=client: upload(client, "a") for client in clients))
    assert made[0].id == made[1].id
    (listed,) = clients[0].files.list()
    assert listed.id == made[0].id
    assert clients[1].files.content(listed.id).content == jsonl([line("a")])


def test_two_uploads_with_one_key_are_never_mixed(
    clients: list[openai.OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are there; that the key came with another request is seen by whoever comes later."""
    with monkeypatch.context() as patch:
        at_once(patch, "add_file")
        made = sent(lambda: upload(clients[0], "a"), lambda: upload(clients[1], "b", "c"))
    for file, names in zip(made, (["a"], ["b", "c"]), strict=True):
        assert clients[0].files.content(file.id).content == jsonl([line(one) for one in names])
    assert [upload(clients[0], "a"), upload(clients[0], "b", "c")] == made
    with pytest.raises(openai.ConflictError):
        upload(clients[0], "d")


def test_an_upload_that_cannot_be_recorded_leaves_the_other_one(
    clients: list[openai.OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, turns = ClientStorage._write, itertools.count()

    def fails_second(own: ClientStorage, name: str, value: Any) -> None:
        if next(turns):
            raise OSError("the store does not answer")
        write(own, name, value)

    at_once(monkeypatch, "add_file")
    monkeypatch.setattr(ClientStorage, "_write", fails_second)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(upload, client, "a") for client in clients]
    (made,) = [future.result() for future in futures if future.exception() is None]
    assert clients[0].files.content(made.id).content == jsonl([line("a")])


def test_the_same_batch_runs_once(
    clients: list[openai.OpenAI], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second replica stands still between its look and its writing, while the first one's batch begins to run."""
    file_id, own = upload(clients[0], "a", "b").id, storage_of(tmp_path)
    add_batch, turns = ClientStorage.add_batch, itertools.count()
    stands, may_go = threading.Event(), threading.Event()

    def held(*given: Any) -> Any:
        if next(turns) == 0:
            stands.set()
            assert may_go.wait(30)
        return add_batch(*given)

    monkeypatch.setattr(ClientStorage, "add_batch", held)
    with ThreadPoolExecutor(1) as pool:
        late: Future[Any] = pool.submit(create, clients[1], file_id)
        assert stands.wait(30)
        made = create(clients[0], file_id)
        begin_run(own, made.id, documents=2)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        may_go.set()
        again = late.result()
    assert (again.id, again.created_at, again.status) == (made.id, made.created_at, "in_progress")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [one.id for one in clients[0].batches.list()] == [made.id]


def test_what_a_deletion_has_left_long_ago_is_not_the_state_of_the_next_batch(
    clients: list[openai.OpenAI], tmp_path: Path
) -> None:
    own, file_id = storage_of(tmp_path), upload(clients[0], "a").id
    made = create(clients[0], file_id)
    record = own.batch(made.id)
    assert record is not None
    end_batch(own, record, "expired", print)
    folder = tmp_path / "storage" / own.name / "batches"
    (folder / f"{made.id}.json").unlink()
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name.removeprefix(made.id) for path in left} > set(BESIDE[1:])
    for path in left:
        os.utime(path, (time.time() - LEFT_S - 60,) * 2)
    again = create(clients[1], file_id)
    assert (again.id, again.status) == (made.id, "validating")
    assert Path(folder, f"{made.id}.jsonl").read_bytes() == jsonl([line("a")])


def test_ids_of_a_key() -> None:
    ids = [keyed_id("file-", client, key, digest * 32) for client in "ab" for key in "kl" for digest in ("00", "ff")]
    assert len(set(ids)) == 8
    assert len({one[:-8] for one in ids}) == 4
