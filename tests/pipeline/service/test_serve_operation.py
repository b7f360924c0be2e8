"""The endpoint killed, drained and deployed beside others, with real processes; and the offline job's same tokens."""

import asyncio
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import command, environment, rows, run, wait_for
from tests.support.service_clients import (
    CUT,
    PROMPTS,
    Made,
    any_request_or_stream,
    check,
    clients,
    understood,
)
from tests.support.service_helpers import DECODE, DEMO, ROOT, Offline, Served, free_port, replica_pids, served

BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back(tmp_path: Path) -> None:
    """Requests that were inside get Ray's 500, or a stream that breaks off; later ones wait, and are answered."""
    num_clients = 16
    with served(tmp_path) as server:
        (pid,) = replica_pids(server.process.pid)

        async def under_load() -> tuple[Made, float]:
            load = asyncio.create_task(clients(server, num_clients, 30, any_request_or_stream))
            await asyncio.sleep(5)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            return await load, killed_at

        made, killed_at = asyncio.run(under_load())
        seen = Counter((status, answer if isinstance(answer, str) else "JSON") for _, status, answer, _ in made)
        failed = sorted(sent_at - killed_at for _, status, answer, sent_at in made if status != 200 or answer == CUT)
        print(f"seen {seen}; failed ones were sent {[round(at, 2) for at in failed]} s after the kill")
        assert seen.keys() >= {(200, CUT), (500, "Internal Server Error")}, "nothing was in flight"
        assert {status for status, _ in seen} == {200, 500}
        assert len(failed) <= num_clients + NOTICE_COUNT
        assert failed[-1] < NOTICE_S
        later = [sent_at for *_, sent_at in made if sent_at > killed_at + NOTICE_S]
        assert len(later) > 50, "it is not back"
        check(Offline(), made)
        (other,) = replica_pids(server.process.pid)
        assert other != pid


NOTICE_S = 1.0  # until Ray's proxy knows of the death, by the first request that it sends there
NOTICE_COUNT = 4  # requests that may fail beside those inside; none was seen, all had been sent before the kill


@pytest.mark.slow
def test_a_replica_whose_engine_is_dead_is_replaced(tmp_path: Path) -> None:
    """A step that takes longer than `limits.stall_s`, since its process stands still meanwhile: whoever is inside gets
    503, and Ray starts another replica."""
    wide = ["engine.batch_size=64", "engine.max_prefill_tokens=256", "limits.max_prompts=64"]
    with served(tmp_path, "limits.stall_s=1.5", *wide) as server, ThreadPoolExecutor(2) as pool:
        (pid,) = replica_pids(server.process.pid)
        inside = pool.submit(server.post, {"prompt": [[7] * 100] * 64, "max_tokens": 900, "ignore_eos": True})
        time.sleep(0.5)
        for _ in range(20):  # now and then it stands still between two steps, or a step ends before anybody looks
            os.kill(pid, signal.SIGSTOP)
            looks = pool.submit(server.get, "/health")
            time.sleep(2)
            os.kill(pid, signal.SIGCONT)
            if looks.result().json()["status"] == "dead":
                break
            assert not inside.done()
        assert (inside.result().status_code, inside.result().json()["error"]["code"]) == (503, "engine_dead")
        # until the dead one is gone, requests may still be sent to it, which answers 503
        wait_for(lambda: (found := replica_pids(server.process.pid)) and pid not in found, server.process, timeout_s=90)
        wait_for(lambda: server.get("/health").status_code == 200, server.process, timeout_s=60)
        answer = server.post({"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "return_token_ids": True})
        assert answer.json()["choices"][0]["token_ids"] == Offline()(PROMPTS[0], 8).tokens


@pytest.mark.slow
def test_sigterm_cuts_no_answer(tmp_path: Path) -> None:
    """Streams and whole answers that are inside are answered to the last byte, and so is a request whose body is still
    coming; new requests get 503 meanwhile."""
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    later: list[int] = []

    def ask(number: int) -> tuple[int, Any]:
        answer = server.post(body | {"prompt": PROMPTS[number], "stream": number % 2 == 0})
        return answer.status_code, understood(answer.headers["content-type"].partition(";")[0], answer.content)

    def slow_body() -> Iterator[bytes]:
        yield b'{"prompt": "x", '
        is_last.wait()
        time.sleep(1)
        yield b'"max_tokens": 4}'

    def ask_again() -> None:
        try:
            while True:
                later.append(server.post({"prompt": "x", "max_tokens": 1}).status_code)
        except httpx.TransportError:
            later.append(0)  # nobody is there any more

    is_last = threading.Event()
    with served(tmp_path) as server, ThreadPoolExecutor(9) as pool:
        slow = pool.submit(httpx.post, f"{server.url}/v1/completions", content=slow_body(), timeout=60)
        inside = [pool.submit(ask, number) for number in range(8)]
        while server.get("/health").json()["running"] < 8:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        again = threading.Thread(target=ask_again)
        again.start()
        answers = [one.result() for one in inside]
        is_last.set()
        assert slow.result().status_code == 200
        assert server.process.wait(timeout=60) == 0
        again.join()
    offline = Offline()
    for number, (status, answer) in enumerate(answers):
        assert status == 200
        assert answer["choices"][0]["token_ids"] == offline(PROMPTS[number], 200, ignore_eos=True).tokens
    begun = later.index(503)
    assert set(later[:begun]) <= {200}
    assert set(later[begun:-1]) == {503}
    assert json.loads(server.log.read_text().splitlines()[-1])["unanswered"] == 0


@pytest.mark.slow
def test_sigterm_while_the_replica_loads_is_an_end_in_order(tmp_path: Path) -> None:
    """From the first moment on at which the port is open."""
    port, log = free_port(), tmp_path / "serve.log"
    command = [sys.executable, "-m", "jobs.serve", "--port", str(port), f"model.source={DEMO}"]
    with log.open("w") as target:
        process = subprocess.Popen(command, cwd=ROOT, stdout=target, stderr=target, start_new_session=True)
    wait_for(lambda: is_open(port), process, timeout_s=120)
    process.terminate()
    assert process.wait(timeout=60) == 0, log.read_text()
    assert json.loads(log.read_text().splitlines()[-1])["unanswered"] == 0
    assert not re.search(r"SIGTERM received|Traceback|Connecting to existing", log.read_text())


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_other_applications_of_a_cluster_go_on(tmp_path: Path) -> None:
    """After a run of ours, and after one that a bad configuration ended."""
    program = tmp_path / "other.py"
    program.write_text(OTHERS)
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, str(program), DEMO], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:] == ["bad 2 RUNNING", "good 200", "after RUNNING None"]


OTHERS = """
import os, sys, urllib.request
import ray
from ray import serve
from jobs import serve as verb
from pipeline.service.serve import load, running
from tests.support.service_helpers import free_port

@serve.deployment
class Other:
    def __call__(self):
        return "other"

ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
port = free_port()
serve.start(http_options={"port": port})
serve.run(Other.bind(), name="other", route_prefix="/other")
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
state = lambda name: getattr(serve.status().applications.get(name), "status", None)
keys = [f"model.source={sys.argv[1]}", "decode={method: full}", "auth.open_on_loopback=true"]
code = verb.main(["--port", str(port), "model.source=nowhere"])
print("bad", code, state("other").value)
with running(load(None, keys, None, port)) as url:
    print("good", urllib.request.urlopen(url + "health").status)
assert urllib.request.urlopen(f"http://127.0.0.1:{port}/other").read() == b"other"
print("after", state("other").value, state("skipdecode"))
"""


@pytest.mark.slow
def test_serve_run_takes_the_same_file(tmp_path: Path) -> None:
    """Ray's own command, in the checkout: the file names the model by a relative path."""
    tree = yaml.safe_load((ROOT / "configs/serve.yaml").read_text())
    tree["http_options"]["port"] = free_port()
    tree["applications"][0]["args"]["auth"] = {"open_on_loopback": True}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
    command = [str(BIN / "serve"), "run", str(tmp_path / "serve.yaml")]
    env = environment(None, tmp_path, RAY_ADDRESS="local")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    server = Served(f"http://127.0.0.1:{tree['http_options']['port']}", process, tmp_path / "log")
    try:
        wait_for(lambda: answers(server), process, timeout_s=120)
        (choice,) = server.post({"prompt": PROMPTS[0], "max_tokens": 8}).json()["choices"]
        assert choice["text"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


@pytest.mark.slow
def test_serve_deploy_of_two_replicas(tmp_path: Path) -> None:
    """`ray start --head` and `serve deploy`: both replicas answer, with the tokens of the offline job; each application
    of the cluster shows its own figures."""
    tree = yaml.safe_load((ROOT / "configs/serve.yaml").read_text())
    (application,) = tree["applications"]
    tree["http_options"]["port"] = port = free_port()
    application["args"] |= {"model": {"source": DEMO, "dtype": "float32"}, "decode": DECODE}
    application["args"] |= {"auth": {"open_on_loopback": True}}
    application["args"]["engine"]["num_threads"] = 1
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = 0.1
    second = copy.deepcopy(application) | {"name": "second", "route_prefix": "/second"}
    application["deployments"][0]["num_replicas"] = 2
    tree["applications"].append(second)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
    offline = Offline()
    with cluster(tmp_path) as (head, env):
        deploy = [str(BIN / "serve"), "deploy", str(tmp_path / "serve.yaml")]
        done = subprocess.run(deploy, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        server = Served(f"http://127.0.0.1:{port}", head, tmp_path / "log")
        other = Served(f"{server.url}/second", head, tmp_path / "log")
        wait_for(lambda: answers(server) and answers(other), head, timeout_s=120)
        wait_for(lambda: len(replica_pids(head.pid)) == 3, head, timeout_s=60)
        body = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(server.post, [body | {"prompt": prompt} for prompt in PROMPTS[:40]]))
        for prompt, answer in zip(PROMPTS, made, strict=False):
            assert answer.json()["choices"][0]["token_ids"] == offline(prompt, 12).tokens
        counts = wait_for(lambda: told(server, sum_to=40), head, timeout_s=60)
        assert len(counts) == 2
        assert min(counts.values()) > 5, "one of them did all"
        assert set(told(other, sum_to=0).values()) == {0.0}


def told(server: Served, *, sum_to: float) -> dict[str, float]:
    """Answered completions by replica as `/metrics` tells them, once they are `sum_to`."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "ray_skipdecode_serve_requests_total" and sample.labels["status"] == "200":
                counts[sample.labels["replica"]] = sample.value
    return counts if sum(counts.values()) == sum_to else {}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    """`ray start --head` on ports of its own: the process, and the environment with which to talk to it."""
    port, dashboard, agent, client = (free_port() for _ in range(4))
    env = environment(None, folder, RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0")
    env |= {"RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    start = [
        str(BIN / "ray"), "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=4",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
        "--object-store-memory=300000000", "--block",
    ]  # fmt: skip
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            start, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    try:
        status = [str(BIN / "serve"), "status"]
        wait_for(lambda: subprocess.run(status, env=env, capture_output=True).returncode == 0, head, timeout_s=120)
        yield head, env
    finally:
        head.terminate()
        head.wait(60)


def answers(server: Served) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


FIXED = ["model.dtype=bfloat16", "sampling.deterministic=true", "sampling.temperature=0.8", "sampling.seed=13"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [["sampling.temperature=0"], ["sampling.temperature=0.8", "sampling.seed=13"], FIXED], ids=str
)
def test_the_offline_job_writes_the_same_tokens(tmp_path: Path, keys: list[str]) -> None:
    """`jobs.generate` and HTTP: same checkpoint, prompts, ids and seeds; in bfloat16 with batches of fixed shapes."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"id": f"p{n}", "prompt": p}) + "\n" for n, p in enumerate(PROMPTS[:20])))
    output = tmp_path / "run"
    decode = ["decode.max_layers=16", "decode.min_layers=8", "decode.horizon=63"]
    arguments = [*decode, "sampling.max_new_tokens=40", "actors.batch_size=8", *keys]
    done = run(command(Path(DEMO), source, output, *arguments), environment(None, tmp_path))
    assert done.returncode == 0, done.stderr
    written = rows(output, "ok")
    shapes = ["model.dtype=bfloat16", "sampling.deterministic=true", "engine.scheduler=cohort", "engine.batch_size=8"]
    with served(tmp_path, *(shapes if keys is FIXED else [])) as server, ThreadPoolExecutor(3) as pool:
        sampled = {"temperature": 0.8, "seed": 13} if len(keys) > 1 else {"temperature": 0}
        body = {"max_tokens": 40, "return_token_ids": True} | sampled
        asked = [body | {"prompt": row["prompt"], "row_id": row_id} for row_id, row in written.items()]
        for row, answer in zip(written.values(), pool.map(server.post, asked), strict=True):
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == row["generated_tokens"]
            assert choice["text"] == row["generated_text"]
            assert choice["finish_reason"] == row["finish_reason"]
    assert len(written) == 20
