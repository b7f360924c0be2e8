"""The queue of batches with processes that only pretend to decode: which is next, and what ends one. No Ray."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.batches.config import BatchesSection, StorageSection
from pipeline.batches.run_config import job_settings
from pipeline.batches.runner import BatchRunner
from pipeline.batches.status import BatchView
from pipeline.batches.storage import ClientStorage, FileRecord, Storage, StoredBatch, new_id
from pipeline.service.config import ServeConfig
from tests.support.batch_helpers import jsonl, line

DRIVER = """
import json, pathlib, sys, time
storage, client, batch = sys.argv[1:]
folder = pathlib.Path(storage, client, "batches", batch)
with open(pathlib.Path(storage).parent / "order", "a") as order:
    order.write(batch + "\\n")
plan = folder.parent / (batch + ".plan")
words = plan.read_text().split() if plan.exists() else ["finish"]
plan.write_text(" ".join(words[1:] or ["finish"]))
folder.mkdir(exist_ok=True)
if words[0] == "crash":
    sys.exit(1)
if words[0] == "wait":
    sys.stdin.read()
    sys.exit(1)
(folder / "batch_output.jsonl").write_text('{}\\n')
(folder / "run.json.0.tmp").write_text(json.dumps({
    "version": "1", "state": "finished", "fingerprint": {}, "input": {"documents": 1}, "books": {"input": 1},
    "sessions": [{"id": "0" * 12, "started_at": time.time(), "ended_at": time.time()}],
    "answers": {"batch_output.jsonl": {"lines": 1}, "batch_errors.jsonl": {"lines": 0}},
}))
(folder / "run.json.0.tmp").rename(folder / "run.json")
"""
JOB = job_settings(ServeConfig())


class Queue:
    """A storage, its runner and the batches that a test makes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, path = folder, str(folder / "storage")
        self.storage, self.said = Storage(path), list[str]()
        self.runner = BatchRunner(
            StorageSection(path=path),
            BatchesSection(**settings),
            self.said.append,
            command=(sys.executable, "-c", DRIVER),
        )
        self.names: dict[str, tuple[ClientStorage, str]] = {}

    def add(
        self,
        name: str,
        client: str,
        plan: str = "finish",
        age_s: int = 0,
        window_s: int = 3600,
        background: bool = False,  # a machine that runs other tests too has nothing to spare
    ) -> None:
        """A batch of the client `client`, one hex digit; `plan`: what each of its drivers does."""
        own, now = self.storage.client(client * 32), int(time.time())
        file: FileRecord = {
            "id": new_id("file-"), "filename": "f", "bytes": 1, "lines": 1, "created_at": now,
            "expires_at": now + 10_000,
        }  # fmt: skip
        content = self.folder / "content"
        content.write_bytes(jsonl([line("a")]))
        with content.open("rb") as source:
            own.add_file(file, source)
        record: StoredBatch = {
            "id": new_id("batch_"), "created_at": now - 1000 - age_s, "expires_at": now + window_s,
            "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h", "metadata": None,
            "output_expires_after_s": 10_000, "model": "m", "model_names": ["m"],
            "job": JOB | {"actors": JOB["actors"] | {"background": background}},
        }  # fmt: skip
        own.add_batch(record)
        Path(own.run_path(record["id"]) + ".plan").write_text(plan)
        self.names[name] = own, record["id"]

    def view(self, name: str) -> BatchView:
        own, batch_id = self.names[name]
        record = own.batch(batch_id)
        assert record is not None
        return BatchView(own, record)

    def status(self, name: str) -> str:
        return self.view(name).status

    def order(self) -> list[str]:
        """The batches by the start of their drivers."""
        of_id = {batch_id: name for name, (_, batch_id) in self.names.items()}
        path = self.folder / "order"
        return [of_id[text] for text in path.read_text().split()] if path.exists() else []

    def until(self, what: Any) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert time.monotonic() < deadline, (self.order(), self.said)
            self.runner.step()
            time.sleep(0.02)


@pytest.fixture
def queue(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Queue]:
    made = Queue(tmp_path, **getattr(request, "param", {}))
    yield made
    made.runner.stop()


def test_clients_take_turns(queue: Queue) -> None:
    for name, client, age_s in (("a1", "a", 9), ("a2", "a", 8), ("a3", "a", 7), ("b1", "b", 6), ("c1", "c", 5)):
        queue.add(name, client, age_s=age_s)
    queue.until(lambda: all(queue.status(name) == "completed" for name in queue.names))
    assert queue.order() == ["a1", "b1", "c1", "a2", "a3"]
    queue.runner.step()
    assert (queue.runner.counts, queue.runner.lines) == ({"completed": 5}, {"completed": 5, "failed": 0})


@pytest.mark.parametrize("queue", [{"turn_s": 0.5}], indirect=True)
def test_a_long_batch_makes_room_for_another_client_and_goes_on(queue: Queue) -> None:
    queue.add("long", "a", plan="wait", age_s=2)
    queue.add("own", "a", age_s=1)
    queue.until(lambda: queue.order() == ["long"])
    for _ in range(40):
        queue.runner.step()
        time.sleep(0.02)
    assert queue.order() == ["long"], "a batch of the same client waits for it"
    queue.add("short", "b")
    queue.until(lambda: all(queue.status(name) == "completed" for name in queue.names))
    assert queue.order() == ["long", "short", "long", "own"]


@pytest.mark.parametrize("queue", [{"max_running": 2}], indirect=True)
def test_so_many_run_at_a_time_and_no_client_has_all_of_them(queue: Queue) -> None:
    for name, client, age_s in (("a1", "a", 9), ("a2", "a", 8), ("b1", "b", 7)):
        queue.add(name, client, plan="wait", age_s=age_s)
    queue.until(lambda: len(queue.order()) == 2)
    assert sorted(queue.order()) == ["a1", "b1"]


def test_cancelled_and_expired_batches_end_whatever_their_driver_does(queue: Queue) -> None:
    queue.add("cancelled", "a", plan="wait", age_s=2)
    queue.add("never_begun", "a", age_s=1)
    queue.until(lambda: queue.order() == ["cancelled"])
    for name in ("cancelled", "never_begun"):
        own, batch_id = queue.names[name]
        own.cancel(batch_id, int(time.time()))
    queue.until(lambda: queue.status("cancelled") == queue.status("never_begun") == "cancelled")
    assert queue.order() == ["cancelled"]
    queue.add("expired", "a", plan="wait", window_s=2)
    queue.until(lambda: queue.status("expired") == "expired")
    assert queue.view("expired").counts() == {"total": 1, "completed": 0, "failed": 1}


def test_a_driver_that_ends_is_started_again_and_others_go_on_meanwhile(queue: Queue) -> None:
    queue.add("bad", "a", plan="crash crash finish", age_s=2)
    queue.add("good", "a", age_s=1)
    queue.until(lambda: queue.status("bad") == queue.status("good") == "completed")
    assert queue.order() == ["bad", "good", "bad", "bad"]
    assert [said.partition("starts in ")[2] for said in queue.said] == ["1 s", "2 s"]


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has this policy")
def test_drivers_give_way_to_the_session_of_their_runner(queue: Queue) -> None:
    """Which is that of the endpoint's replicas (`run_in_background`); yet they hear no Ctrl-C of a terminal."""
    queue.add("a", "a", plan="wait finish", background=True)
    queue.until(lambda: queue.order() == ["a"])
    (process,) = (driver.process for driver in queue.runner._drivers.values())
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE


def test_what_cannot_be_read_does_not_stop_the_others(queue: Queue) -> None:
    queue.add("torn", "a", age_s=2)
    own, batch_id = queue.names["torn"]
    Path(own.run_path(batch_id)).mkdir()
    Path(own.run_path(batch_id), "run.json").write_text("{")
    queue.add("good", "a", age_s=1)
    queue.until(lambda: queue.status("good") == "completed")
    assert "cannot be read" in queue.said[0]


def test_a_batch_that_cannot_be_ended_does_not_stop_the_others(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that its rows cannot be read; it is tried again, and again, but not all the time."""
    tried = list[str]()

    def fails(own: ClientStorage, record: StoredBatch, *_: Any) -> None:
        tried.append(record["id"])
        raise AssertionError("rows that do not belong together")

    monkeypatch.setattr("pipeline.batches.runner.end_batch", fails)
    for name in ("torn", "cannot_end"):
        queue.add(name, "a", age_s=2)
        own, batch_id = queue.names[name]
        own.cancel(batch_id, int(time.time()))
    own, batch_id = queue.names["torn"]
    data = Path(own.run_path(batch_id), "data", "status=ok")
    data.mkdir(parents=True)
    data.joinpath(f"part-{'0' * 12}-0a0b0c-0-0-88888888.parquet").write_bytes(b"no parquet")
    state: Any = {
        "version": "1", "state": "running", "fingerprint": {}, "former": [], "input": {"documents": 1},
        "books": {"input": 1}, "sessions": [{"id": "0" * 12, "started_at": time.time(), "ended_at": None}],
    }  # fmt: skip
    own.run(batch_id).write_state(state)
    queue.add("good", "a", age_s=1)
    queue.until(lambda: queue.status("good") == "completed")
    assert set(tried) == {queue.names["cannot_end"][1]}
    assert any("cannot be read" in said for said in queue.said)
    assert "the next try is in 1 s" in "".join(queue.said)


def test_stopping_ends_the_drivers_and_the_next_runner_goes_on(queue: Queue) -> None:
    queue.add("a", "a", plan="wait finish")
    queue.until(lambda: queue.order() == ["a"])
    queue.runner.stop()
    assert queue.status("a") == "validating"
    queue.until(lambda: queue.status("a") == "completed")


def test_what_is_old_is_deleted(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.add("a", "a")
    queue.until(lambda: queue.status("a") == "completed")
    own, batch_id = queue.names["a"]
    assert len(own.files()) == 1
    monkeypatch.setattr("pipeline.batches.runner.SWEEP_S", 0.0)
    later = time.time() + 31 * 24 * 3600
    monkeypatch.setattr("pipeline.batches.runner.time.time", lambda: later)
    queue.runner.step()
    assert (own.files(), own.batch_ids(), queue.runner._ended) == ([], [], {})
    left = [path.name for path in (queue.folder / "storage").rglob("*") if path.is_file()]
    assert left == [f"{batch_id}.plan"]
    assert json.dumps(queue.said) == "[]"


def test_what_killed_processes_have_left_is_swept_away(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is a day old; what belongs to a record stays."""
    queue.add("a", "a")
    queue.until(lambda: queue.status("a") == "completed")
    own, batch_id = queue.names["a"]
    root = queue.folder / "storage" / own.name
    before = set(root.rglob("*"))
    gone, file_id = "0" * 24, own.files()[0]["id"]
    left = [f"files/file-{gone}.jsonl", f"files/{file_id}.jsonl.01234567.tmp", f"batches/batch_{gone}.jsonl"]
    left += [f"batches/batch_{gone}.ended.json", f"batches/{batch_id}.cancel.json.01234567.tmp"]
    left += [f"batches/batch_{gone}/run.json"]
    for name in left:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    monkeypatch.setattr("pipeline.batches.runner.SWEEP_S", 0.0)
    queue.runner.step()
    assert len(set(root.rglob("*")) - before) == len(left) + 1
    long_ago = time.time() - 2 * 24 * 3600
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, (long_ago, long_ago))
    queue.runner.step()
    assert set(root.rglob("*")) == before
