"""Batches that are hurt: processes of a real endpoint, killed at random; and 5,000 lines.

Minutes each. BATCH_TRIALS is the number of random trials, BATCH_LINES that of lines.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.batches.status import TERMINAL
from pipeline.store.run_folder import BATCH_FILES
from tests.support.batch_helpers import (
    KEY,
    OTHER_KEY,
    PROMPTS,
    answers_of,
    client_of,
    create_batch,
    demo_lines,
    line,
    storage_of,
    wait_for_batch,
)
from tests.support.processes import command, descendants, environment, rows, run, titles
from tests.support.service_helpers import DECODE, DEMO, Offline, Served, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(7200)]
TRIALS = int(os.environ.get("BATCH_TRIALS", "30"))
ORDER = ["validating", "in_progress", "finalizing", "cancelling"]  # then what is terminal
NOT_IDLE = "batches.actors.background=false"  # a machine with other work on it has nothing to spare
NO_ANSWER = openai.APIConnectionError, openai.InternalServerError
FORTY = {"max_tokens": 40, "ignore_eos": True}
VICTIMS = {
    "driver": "pipeline.batches.driver",
    "replica": "ray::ServeReplica:skipdecode:Completions",
    "queue": "ray::ServeReplica:skipdecode:Batches",
    "worker": "ray::MapWorker",
    "head": "gcs_server",
    "controller": "ray::ServeController",
}


@contextmanager
def endpoint(folder: Path, *options: str) -> Iterator[Served]:
    """What is left of it is killed in the end, and so is all that it has started."""
    keys = {"SKIPDECODE_API_KEYS": f"{KEY},{OTHER_KEY}", "SKIPDECODE_LEASE_S": "6"}
    small = ["batches.actors.batch_size=8", "batches.actors.window_batches=1"]
    with served(folder, f"storage.path={folder / 'storage'}", *small, *options, **keys) as server:
        started: set[int] = set()
        try:
            yield server
        finally:
            started |= descendants(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=40)
            for pid in {server.process.pid, *started}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Watch:
    """What is seen of a batch, whoever answers; it must never go back."""

    def __init__(self, batch_id: str) -> None:
        self.batch_id, self.is_cancelled, self.rank, self.completed = batch_id, False, 0, 0

    def look(self, server: Served) -> Any:
        """None while nobody answers."""
        try:
            batch = client_of(server.url).batches.retrieve(self.batch_id)
        except NO_ANSWER:
            return None
        except openai.NotFoundError as error:
            if error.code == "batch_not_found":
                raise
            return None  # Serve's proxy, before it knows of the application
        rank = len(ORDER) if batch.status in TERMINAL else ORDER.index(batch.status)
        assert rank >= self.rank, (batch.status, self.rank)
        assert batch.request_counts.completed >= self.completed or batch.status in TERMINAL
        self.rank, self.completed = rank, batch.request_counts.completed
        return batch


@pytest.mark.parametrize("trial", range(TRIALS))
def test_whoever_dies_every_line_is_answered_once(tmp_path: Path, trial: int) -> None:
    rng, offline, count, killed = random.Random(trial), Offline(), 160, list[str]()
    wants_cancel = trial % 5 == 4
    watch, batch = None, None
    for part in range(4):  # the endpoint may be started again three times
        with endpoint(tmp_path, NOT_IDLE) as server:
            client = client_of(server.url)
            if watch is None:
                watch = Watch(create_batch(client, demo_lines(count, **FORTY)).id)
            is_down = False
            deadline = time.monotonic() + 400
            while not is_down:
                assert time.monotonic() < deadline, (killed, server.log.read_text()[-2000:])
                batch = watch.look(server) or batch
                if batch is not None and batch.status in TERMINAL:
                    break
                if len(killed) < 3 and rng.random() < 0.08:
                    who = rng.choice([name for name in VICTIMS if part < 3 or name != "head"])
                    found = titles(descendants(server.process.pid)).items()
                    for pid in [pid for pid, title in found if VICTIMS[who] in title][:1]:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(who)
                        is_down = who == "head"
                if wants_cancel and batch is not None and batch.request_counts.completed > count // 4:
                    watch.is_cancelled = True  # it may be done even if the answer is lost
                    with suppress(*NO_ANSWER, openai.NotFoundError, openai.ConflictError):  # or the last row has come
                        client.batches.cancel(watch.batch_id)
                time.sleep(0.25)
            if not is_down:
                assert batch is not None
                output, errors = answers_of(client_of(server.url), batch)
                print(f"trial {trial}: killed {killed}, {batch.status}, {len(output)} answers")
                assert errors == []
                assert batch.status == "completed" or (watch.is_cancelled and batch.status == "cancelled")
                assert len(output) == count or batch.status == "cancelled"
                assert all(
                    body["choices"][0]["text"]
                    == offline.text(offline(PROMPTS[int(own.removeprefix("row-")) % 60], 40, ignore_eos=True))
                    for own, body in output.items()
                )
                if batch.status == "cancelled":
                    time.sleep(3)
                    assert watch.look(server).status == "cancelled"
                return
    pytest.fail(f"the endpoint died too often: {killed}")


def with_bad_lines(lines: list[Any], count: int) -> list[Any]:
    """The lines, and among them `count` bad ones of five kinds."""
    made, rng = list(lines), random.Random(0)
    for n in range(count):
        own = line(f"bad-{n}", PROMPTS[n % 60], model="opt-e2e")
        kinds = ["{broken", own | {"custom_id": 7}, own | {"url": "/v1/nothing"}, own | {"body": {"prompt": 3}}]
        made.insert(rng.randrange(len(made)), [*kinds, line("row-7", "again", model="opt-e2e")][n % 5])
    return made


def test_the_lines_are_those_of_generate(tmp_path: Path) -> None:
    """5,000 of them, or BATCH_LINES, of which one in a hundred is bad: the files of the API are those that
    `jobs.generate` makes of the same file, and their tokens are the same. Another key sees nothing of it."""
    count, storage = int(os.environ.get("BATCH_LINES", "5000")), tmp_path / "storage"
    lines = with_bad_lines(demo_lines(count - count // 100, max_tokens=12, ignore_eos=True), count // 100)
    with endpoint(tmp_path, NOT_IDLE, "batches.actors.batch_size=64", "batches.actors.window_batches=4") as server:
        client, other = client_of(server.url), client_of(server.url, OTHER_KEY)
        batch, _ = wait_for_batch(client, create_batch(client, lines).id, timeout_s=1800)
        assert batch.status == "completed"
        made = [client.files.content(own).text for own in (batch.output_file_id, batch.error_file_id)]
        assert list(other.batches.list()) == list(other.files.list()) == []
        for call, own in (
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
            (other.files.retrieve, batch.input_file_id),
            (other.files.content, batch.input_file_id),
            (other.files.content, batch.output_file_id),
            (other.files.content, batch.error_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call(own)
    assert batch.request_counts.model_dump() == {
        "total": count, "completed": count - count // 100, "failed": count // 100
    }  # fmt: skip
    own = storage_of(storage)
    proof = run([sys.executable, "-m", "jobs.verify", own.run_path(batch.id)], environment(None, tmp_path))
    assert proof.returncode == 0, proof.stdout + proof.stderr
    schedule = ", ".join(f"{key}: {value}" for key, value in DECODE.items())
    keys = [f"decode={{{schedule}}}", "limits.max_failed_rows=1.0", "actors.batch_size=64", "input.format=openai_batch"]
    source, target = Path(own.input_path(batch.id)), tmp_path / "run"
    job = command(Path(DEMO), source, target, *keys, "output.model_name=opt-e2e")
    ran = run(job, environment(None, tmp_path))
    assert ran.returncode == 0, ran.stderr

    def parsed(text: str) -> list[Any]:
        found = [json.loads(one) for one in text.splitlines()]
        for one in found:
            if one["response"] is not None:
                del one["response"]["body"]["created"]  # when the run began
        return sorted(found, key=json.dumps)

    wanted = [(target / name).read_text() for name in BATCH_FILES]
    assert [len(parsed(text)) for text in made] == [count - count // 100, count // 100]
    assert [parsed(text) for text in made] == [parsed(text) for text in wanted]
    tokens = [
        {row["id"]: (row["generated_tokens"], row["finish_reason"]) for row in rows(folder, "ok").values()}
        for folder in (Path(own.run_path(batch.id)), target)
    ]
    assert len(tokens[0]) == count - count // 100
    assert tokens[0] == tokens[1]
