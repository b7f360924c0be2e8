"""Batches that the endpoint's replicas decode in their own batches (`batches.workers: shared`), as users see them.

A real application (`jobs.serve`, demo model, float32). All slow; `tests/actors/serving/test_background.py` has the
engine's part without Ray.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from ray import serve

from pipeline.service.app import bind_application, make_spec
from pipeline.service.serve import load, running
from pipeline.store.run_folder import BATCH_FILES
from tests.support.batch_helpers import (
    KEY,
    PROMPTS,
    answers_of,
    client_of,
    create_batch,
    demo_lines,
    storage_of,
    wait_for_batch,
)
from tests.support.processes import command, descendants, environment, hits, rows, run, titles, wait_for
from tests.support.service_helpers import DECODE, DEMO, Offline, Served, free_port, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
SHARED = [
    "batches.workers=shared",
    "engine.batch_size=8",
    "batches.actors.window_batches=2",
    "batches.actors.background=false",  # a machine that runs other tests too has nothing to spare
]
FORTY = {"max_tokens": 40, "ignore_eos": True}
REPLICA = "ray::ServeReplica:skipdecode:Completions"


@contextmanager
def sharing(folder: Path, *options: str, **env: str) -> Iterator[Served]:
    keys = {"SKIPDECODE_API_KEYS": KEY} | env
    with served(folder, f"storage.path={folder / 'storage'}", *SHARED, *options, **keys) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with sharing(folder) as running:
        yield running


def completed(client: openai.OpenAI, batch: Any) -> int:
    return int(client.batches.retrieve(batch.id).request_counts.completed)


def replicas(server: Served) -> list[int]:
    return [pid for pid, title in titles(descendants(server.process.pid)).items() if REPLICA in title]


def check_greedy(output: dict[str, Any], count: int, max_tokens: int = 40) -> None:
    """Each of `count` lines has the text of the decoder offline."""
    offline = Offline()
    assert {own: body["choices"][0]["text"] for own, body in output.items()} == {
        f"row-{n}": offline.text(offline(PROMPTS[n % 60], max_tokens, ignore_eos=True)) for n in range(count)
    }


class Asking:
    """Asks for completions, one after the other, for as long as the block runs."""

    def __init__(self, server: Served) -> None:
        self._client, self._ends = client_of(server.url), threading.Event()
        self.texts: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.is_set():
            made = self._client.completions.create(model="opt-e2e", prompt=PROMPTS[5], max_tokens=12, temperature=0)
            self.texts.append(made.choices[0].text)

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def test_lines_are_answered_as_by_generate_beside_online_requests(server: Served, folder: Path) -> None:
    """Whatever they ask for, token for token; and the report says who decoded."""
    client, kinds = client_of(server.url), [
        {}, {"temperature": 0.9, "seed": 5}, {"logprobs": 2}, {"stop": ["."]}, {"n": 3, "temperature": 0.8},
        {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}, {"frequency_penalty": 1.5},
        {"max_tokens": 1}, {"max_tokens": 150}, {"echo": True, "logprobs": 1, "max_tokens": 0}, {"temperature": "hot"},
    ]  # fmt: skip
    lines = demo_lines(110, **FORTY)
    for n, one in enumerate(lines):
        one["body"] |= kinds[n % len(kinds)]
    with Asking(server) as asking:
        batch, _ = wait_for_batch(client, create_batch(client, lines).id)
    offline = Offline()
    assert set(asking.texts) == {offline.text(offline(PROMPTS[5], 12))}
    assert batch.status == "completed"
    own = storage_of(folder / "storage")
    source, target, made = Path(own.input_path(batch.id)), folder / "run", Path(own.run_path(batch.id))
    schedule = ", ".join(f"{key}: {value}" for key, value in DECODE.items())
    keys = [f"decode={{{schedule}}}", "limits.max_failed_rows=1.0", "input.format=openai_batch"]
    keys += ["sampling.max_new_tokens=64", "output.model_name=opt-e2e"]
    ran = run(command(Path(DEMO), source, target, *keys), environment(None, folder))
    assert ran.returncode == 0, ran.stderr

    def found(run_folder: Path) -> dict[str, Any]:
        columns = "generated_tokens", "finish_reason", "layers_run", "ffns_run", "is_valid", "error_code"
        return {own: [row.get(name) for name in columns] for own, row in rows(run_folder).items()}

    assert found(made) == found(target)

    def answered(run_folder: Path, name: str) -> list[Any]:
        texts = [json.loads(text) for text in (run_folder / name).read_text().splitlines()]
        for one in texts:
            if one["response"] is not None:
                del one["response"]["body"]["created"]  # when the run began
        return sorted((rounded(one) for one in texts), key=json.dumps)

    for name in BATCH_FILES:
        assert answered(made, name) == answered(target, name)
    report = json.loads((made / "report.json").read_text())
    assert all("batches.workers=shared" in one["backend"]["reason"] for one in report["actors"])
    wanted = json.loads((target / "report.json").read_text())
    for name in ("total_input_tokens", "total_output_tokens", "layers_per_token"):
        assert report[name] == wanted[name]
    assert report["speedup"]["measured"] is None
    assert report["decode_output_throughput"] is None
    assert report["decoded_again"] == {"rows": 0, "output_tokens": 0}


def rounded(value: Any) -> Any:
    """Log-probabilities as rows of other batches have them, too."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def test_a_replica_that_is_killed_loses_no_line(server: Served) -> None:
    client = client_of(server.url)
    batch = create_batch(client, demo_lines(160, **FORTY))
    wait_for(lambda: completed(client, batch) >= 16, server.process)
    (pid,) = replicas(server)
    os.kill(pid, signal.SIGKILL)

    def ended() -> Any:
        with suppress(openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
            return wait_for_batch(client, batch.id)[0]

    done = wait_for(ended, server.process)
    assert done.status == "completed"
    output, errors = answers_of(client, done)
    assert errors == []
    check_greedy(output, 160)


def test_a_cancelled_batch_leaves_the_replica(server: Served) -> None:
    client = client_of(server.url)
    batch = create_batch(client, demo_lines(4000, **FORTY))
    wait_for(lambda: completed(client, batch) > 0, server.process)
    assert server.get("/health").json()["background"] > 0
    client.batches.cancel(batch.id)
    gone, _ = wait_for_batch(client, batch.id)
    assert gone.status == "cancelled"
    assert 0 < len(answers_of(client, gone)[0]) == gone.request_counts.completed < 4000
    wait_for(lambda: server.get("/health").json()["background"] == 0, server.process, timeout_s=30)


@contextmanager
def with_faults(folder: Path, faults: dict[str, Any], **env: str) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A batch of 60 lines by an endpoint with these faults, once it has ended: with its output and its errors."""
    planned = environment(faults, folder)["SKIPDECODE_FAULTS"]
    with sharing(folder, SKIPDECODE_FAULTS=planned, **env) as server:
        client = client_of(server.url)
        batch = create_batch(client, demo_lines(60, **FORTY))

        def ended() -> Any:
            with suppress(openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                return wait_for_batch(client, batch.id)[0]

        done = wait_for(ended, server.process, timeout_s=600)
        yield done, *answers_of(client, done)


def test_a_poison_row_ends_one_replica_and_fails_alone(tmp_path: Path) -> None:
    """It ends whoever decodes it: one replica, and then workers until it is found.

    What a replica says comes late here, so it is dead before its caller knows that it had begun, and Ray Serve sends
    the call to the next one.
    """
    kill = {"signal": "SIGKILL", "times": 9}
    late = {"RAY_testing_asio_delay_us": "CoreWorkerService.grpc_server.ReportGeneratorItemReturns=400000:400000"}
    faults = {"decode in background row-21": kill, "decode alone row-21": kill}
    with with_faults(tmp_path, faults, **late) as (done, output, errors):
        assert done.status == "completed"
        assert [(one["custom_id"], one["code"]) for one in errors] == [("row-21", "poison_row")]
        assert len(output) == 59
    assert hits(tmp_path).count("decode in background row-21") == 1


def test_a_row_that_a_replica_fails_on_is_decoded_by_a_worker(tmp_path: Path) -> None:
    """Not by one replica after the other."""
    with with_faults(tmp_path, {"decode in background row-21": {"error": "bad", "times": 9}}) as (done, output, errors):
        assert (done.status, errors) == ("completed", [])
        check_greedy(output, 60)
    assert hits(tmp_path).count("decode in background row-21") == 1


def test_an_application_that_is_deployed_anew_goes_on(tmp_path: Path) -> None:
    """Ray Serve replaces the queue and two replicas by one, in order: no row is lost, and no worker loads the model."""
    schedule = ", ".join(f"{key}: {value}" for key, value in DECODE.items())
    keys = [f"model.source={DEMO}", "model.dtype=float32", f"decode={{{schedule}}}", "auth.open_on_loopback=true"]
    file = load("configs/serve.yaml", [*keys, *SHARED, f"storage.path={tmp_path / 'storage'}"], None, free_port())
    two, one = ({**file.deployment, "num_replicas": count} for count in (2, 1))
    with running(replace(file, deployment=two)) as url:
        client = openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=60)
        batch = create_batch(client, demo_lines(400, **FORTY))
        wait_for(lambda: completed(client, batch) >= 32)
        serve.run(bind_application(make_spec(file.args), one), name=file.name, route_prefix=file.route_prefix)
        done, _ = wait_for_batch(client, batch.id)
        assert done.status == "completed"
        output, errors = answers_of(client, done)
    assert errors == []
    check_greedy(output, 400)
    (report,) = (tmp_path / "storage").rglob("report.json")
    figures = json.loads(report.read_text())
    assert figures["prefill_s"] == figures["decode_s"] == 0, "a worker has decoded"


def test_a_batch_keeps_its_schedule_where_another_is_deployed(tmp_path: Path) -> None:
    """The new replicas, which decode at full depth, refuse its rows; workers of its own decode them."""
    schedule = ", ".join(f"{key}: {value}" for key, value in DECODE.items())
    keys = [f"model.source={DEMO}", "model.dtype=float32", "auth.open_on_loopback=true", *SHARED]
    keys.append(f"storage.path={tmp_path / 'storage'}")
    before = load("configs/serve.yaml", [*keys, f"decode={{{schedule}}}"], None, free_port())
    after = load("configs/serve.yaml", [*keys, "decode={method: full}"], None, None)
    with running(before) as url:
        client = openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=60)
        batch = create_batch(client, demo_lines(200, **FORTY))
        wait_for(lambda: completed(client, batch) >= 16)
        deployed = bind_application(make_spec(after.args), after.deployment)
        serve.run(deployed, name=before.name, route_prefix=before.route_prefix)
        done, _ = wait_for_batch(client, batch.id)
        output, errors = answers_of(client, done)
    assert errors == []
    check_greedy(output, 200)
    (report,) = (tmp_path / "storage").rglob("report.json")
    assert json.loads(report.read_text())["decode_s"] > 0, "no worker has decoded"
