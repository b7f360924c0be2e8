"""Batches as their users see them: the openai client against a real Ray Serve application, and what it survives.

One application for the module (`jobs.serve`, demo model, float32). All slow, since `test_batches` and `test_runner` run
the same code without Ray.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.batches.status import TERMINAL
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
from tests.support.processes import descendants, titles, wait_for
from tests.support.service_helpers import Offline, Served, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
BAD = [
    "{no json",
    line("", PROMPTS[0], model=None),
    line("row-1", PROMPTS[2], model=None),  # the id of another line
    line("too-hot", PROMPTS[3], model="opt-e2e", temperature="hot"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    keys = {"SKIPDECODE_API_KEYS": f"{KEY},{OTHER_KEY}"}
    options = [f"storage.path={folder / 'storage'}", "batches.actors.batch_size=8", "batches.actors.window_batches=1"]
    options.append("batches.actors.background=false")  # a machine that runs other tests too has nothing to spare
    with served(folder, *options, **keys) as running:
        yield running


def drivers(server: Served, batch_id: str = "") -> set[int]:
    found = titles(descendants(server.process.pid)).items()
    return {pid for pid, title in found if "pipeline.batches.driver" in title and batch_id in title}


def test_a_batch_is_answered_line_by_line(server: Served, folder: Path) -> None:
    """The answers are those of the decoder offline, beside completions that are answered meanwhile."""
    client = client_of(server.url)
    batch = create_batch(client, demo_lines(40, max_tokens=12) + BAD, metadata={"corpus": "inns"})
    assert batch.status == "validating"
    offline = Offline()
    asked = client.completions.create(model="opt-e2e", prompt=PROMPTS[0], max_tokens=12, temperature=0)
    assert asked.choices[0].text == offline.text(offline(PROMPTS[0], 12))
    done, _ = wait_for_batch(client, batch.id)
    assert (done.status, done.metadata) == ("completed", {"corpus": "inns"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (44, 40, 4)
    output, errors = answers_of(client, done)
    assert {own: body["choices"][0]["text"] for own, body in output.items()} == {
        f"row-{n}": offline.text(offline(PROMPTS[n], 12)) for n in range(40)
    }
    assert {body["model"] for body in output.values()} == {"opt-e2e"}
    assert sorted(error["code"] for error in errors) == ["bad_line", "bad_line", "bad_parameters", "duplicate_id"]
    assert done.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in output.values())
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    other = client_of(server.url, OTHER_KEY)
    assert list(other.batches.list()) == list(other.files.list()) == []
    for call, own in ((other.batches.retrieve, batch.id), (other.files.content, done.output_file_id)):
        with pytest.raises(openai.NotFoundError):
            call(own)
    with pytest.raises(openai.NotFoundError):
        other.batches.cancel(batch.id)
    assert storage_of(folder / "storage").run(batch.id).read_state()["state"] == "finished"  # type: ignore[index]


def test_an_input_for_another_model_fails_before_anything_runs(server: Served) -> None:
    client = client_of(server.url)
    lines = [*demo_lines(3, max_tokens=12), line("other", PROMPTS[0], model="gpt-9")]
    failed, _ = wait_for_batch(client, create_batch(client, lines).id)
    assert failed.status == "failed"
    assert [(one.code, one.line, one.param) for one in failed.errors.data] == [("model_not_found", 4, "body.model")]
    assert failed.output_file_id is None
    chats, _ = wait_for_batch(
        client, create_batch(client, demo_lines(2, max_tokens=12), endpoint="/v1/chat/completions").id
    )
    assert [one.code for one in chats.errors.data] == ["mismatched_endpoint"] * 2


@pytest.mark.slow
def test_a_killed_driver_and_a_killed_queue_lose_nothing_and_a_cancelled_batch_stays_so(server: Served) -> None:
    client, offline = client_of(server.url), Offline()
    batch = create_batch(client, demo_lines(120, max_tokens=60, ignore_eos=True))
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 8, server.process)
    for pid in drivers(server, batch.id):
        os.kill(pid, signal.SIGKILL)
    waiting = create_batch(client, demo_lines(4000, max_tokens=60, ignore_eos=True))
    wait_for(lambda: drivers(server, batch.id), server.process)
    queue = [pid for pid, title in titles(descendants(server.process.pid)).items() if "ServeReplica" in title]
    (runner,) = [pid for pid in queue if "Batches" in titles({pid})[pid]]
    os.kill(runner, signal.SIGKILL)
    done, states = wait_for_batch(client, batch.id)
    assert done.status == "completed"
    order = ["validating", "in_progress", "finalizing", "completed"]
    assert [order.index(state) for state in states] == sorted(order.index(state) for state in states)
    output, errors = answers_of(client, done)
    assert errors == []
    assert {own: body["choices"][0]["text"] for own, body in output.items()} == {
        f"row-{n}": offline.text(offline(PROMPTS[n % 60], 60, ignore_eos=True)) for n in range(120)
    }
    wait_for(lambda: client.batches.retrieve(waiting.id).request_counts.completed > 0, server.process)
    assert client.batches.cancel(waiting.id).status == "cancelling"
    gone, _ = wait_for_batch(client, waiting.id)
    assert (gone.status, drivers(server, waiting.id)) == ("cancelled", set())
    some, none = answers_of(client, gone)
    assert (0 < len(some) == gone.request_counts.completed < 4000, none) == (True, [])
    time.sleep(2)
    assert client.batches.retrieve(waiting.id) == gone


def test_metrics_count_batches(server: Served) -> None:
    """The page of metrics has them; Ray exports them every few seconds."""

    def found() -> dict[str, float]:
        text = server.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        families = text_string_to_metric_families(text)
        own = [s for family in families for s in family.samples if s.name == "ray_skipdecode_serve_batches"]
        return {sample.labels["status"]: sample.value for sample in own}

    wait_for(lambda: found().get("completed", 0) >= 1 and found()["failed"] >= 2, server.process, timeout_s=60)
    assert found().keys() >= TERMINAL
    assert json.loads(server.get("/health").text)["status"] == "ok"
