"""The endpoint as an outside tester would try it: bodies that are bombs, clients that never read, requests at random,
and connections that say nothing. Real HTTP; the last ones against a whole `jobs.serve`."""

import json
import os
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.generator import Generator, GeneratorConfig
from pipeline.json_size import MAX_MARKS
from pipeline.service.parse import OWN_KEYS
from tests.support.processes import descendants, wait_for, workers
from tests.support.service_helpers import Served, local, make_endpoint, served

MIB = 1 << 20
MAX_BODY = 4 * MIB
STATUSES = {200, 400, 404, 405, 408, 413, 422, 429}
"""Of requests at random: none is the server's own fault."""
NUM_FUZZED = int(os.environ.get("FUZZ_EXAMPLES", "4000"))
FUZZ = settings(max_examples=NUM_FUZZED, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    decode = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
    return Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def url(generator: Generator) -> Iterator[str]:
    endpoint = make_endpoint(generator)
    with local(endpoint) as running:
        yield running
    endpoint.close()


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    made = socket.socket()
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.settimeout(30)
    made.connect((host, int(port)))
    return made


def head(url: str, *lines: str) -> bytes:
    host = url.removeprefix("http://")
    return "\r\n".join(["POST /v1/completions HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def ask(connection: socket.socket, url: str, **body: Any) -> None:
    text = json.dumps(body).encode()
    connection.sendall(head(url, f"Content-Length: {len(text)}") + text)


def status(connection: socket.socket) -> int:
    return int(connection.recv(4096).split()[1])


# Bodies


def test_a_chunked_body_is_refused_where_it_is_too_large(url: str) -> None:
    part = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    with connect(url) as connection:
        connection.sendall(head(url, "Transfer-Encoding: chunked"))
        for _ in range(MAX_BODY // MIB):
            connection.sendall(part)
        connection.sendall(b"1\r\n \r\n")  # and it would go on for ever
        assert status(connection) == 413
    with connect(url) as connection:
        connection.sendall(head(url, f"Content-Length: {10**12}"))
        assert status(connection) == 413


BOMBS = {
    "lists in lists": b"[" * MAX_BODY,
    "objects in objects": b'{"a":' * (MAX_BODY // 5),
    "empty lists": b'{"prompt": [' + b"[]," * (MAX_BODY // 3 - 10) + b"[]]}",
    "empty objects": b'{"prompt": [' + b"{}," * (MAX_BODY // 3 - 10) + b"{}]}",
    "keys": b'{"prompt": "a"' + b"".join(b',"%x":0' % n for n in range(380_000)) + b"}",
    "digits": b'{"prompt": ' + b"9" * (MAX_BODY - 100) + b"}",
    "a number of many digits": b'{"seed": 1e' + b"9" * 1000 + b"}",
    "text of escapes": b'{"model": "' + b"\\ud800" * (MAX_BODY // 6 - 10) + b'"}',
    "token ids": b'{"prompt": [' + b"1," * (MAX_BODY // 2 - 20) + b"1]}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_of_json_is_refused_and_takes_little_memory(url: str, name: str) -> None:
    """Six at once: as many as are read at a time on a machine of two cores."""
    body = BOMBS[name]
    assert MIB < len(body) <= MAX_BODY or name == "a number of many digits"

    def post(_: int) -> tuple[int, str]:
        answer = httpx.post(f"{url}/v1/completions", content=body, timeout=60)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(6) as pool:
        tracemalloc.start()
        try:
            answers = list(pool.map(post, range(6)))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert {status for status, _ in answers} == {400}
    assert all(len(text) < 1000 and "error" in json.loads(text) for _, text in answers)
    assert most < 300 * MIB, f"{most >> 20} MiB"


def test_token_ids_of_a_full_request_are_no_bomb(url: str) -> None:
    """128 prompts, as long as the model has positions; the limit is above those of any model here."""
    asked = {"prompt": [[1] * 100] * 128, "max_tokens": 1}
    assert MAX_MARKS > 128 * 2048
    assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200


# Clients that never read


@pytest.mark.slow
def test_a_client_that_never_reads_its_stream_is_cut_off(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share and its answer are free again, soon after limits.request_timeout_s."""
    monkeypatch.setattr("pipeline.service.routes.CUT_S", 1.0)
    endpoint = make_endpoint(generator, limits={"request_timeout_s": 3, "max_client_prompts": 40})
    with local(endpoint, send_bytes=8192) as url, connect(url, 4096) as connection:
        ask(connection, url, prompt=["a"] * 30, max_tokens=100, ignore_eos=True, logprobs=5, stream=True)
        wait_for(lambda: endpoint.num_answering == 1, timeout_s=30)
        more = {"prompt": ["a"] * 20, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=more, timeout=30).status_code == 429
        wait_for(lambda: endpoint.num_answering == 0 and endpoint.num_responses == 0, timeout_s=30)
        assert httpx.post(f"{url}/v1/completions", json=more, timeout=30).status_code == 200
        assert (endpoint.thread.num_running, endpoint.thread.num_waiting) == (0, 0)
    endpoint.close()


# At random

TEXT = st.text(max_size=30)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
TOKENS = st.lists(st.integers(-1, 330), max_size=20)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT | st.lists(TEXT, max_size=4) | TOKENS | st.lists(TOKENS, max_size=3),
    "model": st.sampled_from(["tiny", "other", ""]),
    "max_tokens": st.integers(-1, 12) | st.sampled_from([0, 120, 2**31, 2**63, 2**64]),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1, -1, 1e-300, 1e300, 10**400]),
    "top_p": st.floats(0, 1) | st.sampled_from([0, 1, 1e-300]),
    "top_k": st.integers(-2, 400),
    "seed": st.integers(-(2**65), 2**65),
    "stop": TEXT | st.lists(TEXT, max_size=18),
    "logprobs": st.integers(-1, 6),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": ANY}),
    "n": st.integers(0, 2),
    "best_of": st.integers(0, 2),
    "suffix": TEXT,
    "logit_bias": st.dictionaries(TEXT, st.floats(), max_size=2),
    "user": TEXT,
    "row_id": TEXT | st.just("r" * 600),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_layers": st.booleans(),
}
BODIES = st.fixed_dictionaries(
    {"prompt": LIKELY["prompt"] | LIKELY["prompt"] | LIKELY["prompt"] | ANY},
    optional={name: likely | likely | ANY for name, likely in LIKELY.items() if name != "prompt"},
)


def check_answer(answer: httpx.Response) -> None:
    """Whole, in the words of the API, and not the server's own fault."""
    assert answer.status_code in STATUSES, (answer.status_code, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])
    elif answer.status_code == 200:
        assert answer.json()["object"] in ("text_completion", "list", "model")
    else:
        assert answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as made:
        yield made


def test_the_fuzzer_knows_every_parameter() -> None:
    assert LIKELY.keys() >= OWN_KEYS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_request_breaks_the_server(client: httpx.Client) -> None:
    seen: dict[int, int] = {}

    @FUZZ
    @given(body=BODIES)
    def fuzz(body: dict[str, Any]) -> None:
        answer = client.post("/v1/completions", content=json.dumps(body).encode())
        check_answer(answer)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

    fuzz()
    print(f"{NUM_FUZZED} requests: {seen}")
    assert seen.keys() >= {200, 400}
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(FUZZ, max_examples=NUM_FUZZED // 4)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
    path=st.sampled_from(["/v1/completions", "/v1/models", "/v1/models/tiny", "/v1/chat/completions", "/v1/x"])
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map("/v1/models/{}".format),
    content=st.binary(max_size=200) | ANY.map(lambda value: json.dumps(value).encode()),
    kind=st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "\xff"]),
)
def test_no_route_breaks_the_server(client: httpx.Client, method: str, path: str, content: bytes, kind: str) -> None:
    headers = {"Content-Type": kind.encode("latin-1")}
    answer = client.request(method, path, content=content, headers=headers)
    if method == "HEAD" or not answer.content:
        assert answer.status_code in STATUSES | {204, 307}
    elif answer.status_code != 307:  # Starlette's, to the path without a slash at its end
        check_answer(answer)


# Connections that say nothing


def most_connections() -> int:
    """10,000, or as many as this machine lets a process have open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # processes that are started now have it too
    return min(10_000, hard - 1000)


def proxy_and_replica(server: Served) -> set[int]:
    started = descendants(server.process.pid)
    pids = workers(started, "ray::ProxyActor") | workers(started, "ray::ServeReplica")
    assert len(pids) == 2
    return pids


def threads_and_bytes(pids: set[int]) -> tuple[int, int]:
    """Of all of them together."""
    page = os.sysconf("SC_PAGE_SIZE")
    taken = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids)
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids), taken


def answered_in(server: Served) -> float:
    """Seconds; the median of five."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert server.post({"prompt": "name[The Mill]", "max_tokens": 2, "temperature": 0}).status_code == 200
        times.append(time.monotonic() - began)
    return sorted(times)[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_connections_that_say_nothing_or_little(tmp_path: Path) -> None:
    """1,000, then 10,000 or as many as there may be: half of them silent, half with half a header, some of it slow."""
    most = most_connections()
    print(f"up to {most} connections; a process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open")
    with served(tmp_path) as server, ExitStack() as stack:
        pids = proxy_and_replica(server)
        answered_in(server)
        threads, taken = threads_and_bytes(pids)
        calm_s = answered_in(server)
        made: list[socket.socket] = []
        for count in (1000, most):
            while len(made) < count:
                made.append(stack.enter_context(connect(server.url)))
                if len(made) % 2:
                    made[-1].sendall(head(server.url)[:-4])
            drip = threading.Thread(target=drip_headers, args=(made[1:200:2], 5.0))
            drip.start()
            seconds = answered_in(server)
            drip.join()
            threads_now, taken_now = threads_and_bytes(pids)
            each = (taken_now - taken) / count / 1024
            print(f"{count}: {threads} -> {threads_now} threads, {each:.0f} KiB each, {calm_s:.3f} -> {seconds:.3f} s")
            assert threads_now <= threads + 4
            assert taken_now - taken < 32 * MIB + count * 32 * 1024
            assert seconds < calm_s + 1


def drip_headers(connections: list[socket.socket], seconds: float) -> None:
    """A byte of a header at a time, as slowloris does."""
    ends_at = time.monotonic() + seconds
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nX-A: ")
    while time.monotonic() < ends_at:
        for connection in connections:
            connection.sendall(b"b")
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_that_nobody_reads(tmp_path: Path) -> None:
    """Others are answered, what the streams hold is bounded, and the endpoint ends when it is told to."""
    with served(tmp_path, "limits.request_timeout_s=20") as server:
        pids = proxy_and_replica(server)
        answered_in(server)
        _, taken = threads_and_bytes(pids)
        with ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(connect(server.url, 4096))
                ask(connection, server.url, prompt=["a"] * 8, max_tokens=200, ignore_eos=True, logprobs=5, stream=True)
            wait_for(lambda: server.get("/health").json()["running"] > 0, timeout_s=60)
            idle = {"running": 0, "waiting": 0}
            wait_for(lambda: idle.items() <= server.get("/health").json().items(), timeout_s=60)
            assert answered_in(server) < 5
            _, taken_now = threads_and_bytes(pids)
            print(f"{(taken_now - taken) >> 20} MiB more")
            assert taken_now - taken < 300 * MIB
            server.process.terminate()
            assert server.process.wait(timeout=100) == 0
