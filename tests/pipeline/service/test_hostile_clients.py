"""The endpoint as an outside tester would try it: bodies that are bombs, a client that never reads, requests at random.

Real HTTP of one replica. Left out: many connections, against a whole `jobs.serve` (`test_idle_connections`).
"""

import json
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.generator import Generator
from pipeline.json_size import MAX_MARKS
from pipeline.service.requests import CompletionRequest
from tests.support.processes import wait_for
from tests.support.service_helpers import local, make_endpoint
from tests.support.sockets import ask, connect, head, status

MIB = 1 << 20
MAX_BODY = 4 * MIB
STATUSES = {200, 400, 404, 405, 408, 413, 422, 429}
"""Of requests at random: none is the server's own fault."""
NUM_FUZZED = int(os.environ.get("FUZZ_EXAMPLES", "4000"))
FUZZ = settings(max_examples=NUM_FUZZED, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def url(generator: Generator) -> Iterator[str]:
    endpoint = make_endpoint(generator)
    with local(endpoint) as running:
        yield running
    endpoint.close()


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
    "max_completion_tokens": st.integers(-1, 12),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1, -1, 1e-300, 1e300, 10**400]),
    "top_p": st.floats(0, 1) | st.sampled_from([0, 1, 1e-300]),
    "top_k": st.integers(-2, 400),
    "seed": st.integers(-(2**65), 2**65),
    "stop": TEXT | st.lists(TEXT, max_size=18),
    "logprobs": st.integers(-1, 21),
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
    "min_p": st.floats(-1, 2),
    "min_tokens": st.integers(-1, 12),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "stop_token_ids": st.lists(st.integers(-1, 400), max_size=3),
    "repetition_detection": st.fixed_dictionaries({}, optional={"max_pattern_size": st.integers(-1, 30), "x": ANY}),
    "structured_outputs": st.fixed_dictionaries({}, optional={"choice": st.lists(TEXT, max_size=2), "regex": TEXT}),
    "response_format": st.just({"type": "text"}) | st.just({"type": "json_object"}) | ANY,
}
MAD = st.fixed_dictionaries(
    {"prompt": LIKELY["prompt"] | LIKELY["prompt"] | LIKELY["prompt"] | ANY},
    optional={name: likely | likely | ANY for name, likely in LIKELY.items() if name != "prompt"},
)
GOOD = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(TEXT, min_size=1, max_size=4) | st.lists(st.integers(0, 319), min_size=1, max_size=20)},
    optional={
        "max_tokens": st.integers(1, 12),
        "temperature": st.floats(0, 1e300),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 400),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=16),
        "logprobs": st.integers(0, 5),
        **{name: st.booleans() for name in ("echo", "stream", "ignore_eos", "return_token_ids", "return_layers")},
    },
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
    assert LIKELY.keys() >= CompletionRequest.model_fields.keys()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_request_breaks_the_server(client: httpx.Client) -> None:
    seen: dict[int, int] = {}

    @FUZZ
    @given(body=GOOD | MAD)
    def fuzz(body: dict[str, Any]) -> None:
        answer = client.post("/v1/completions", content=json.dumps(body).encode())
        check_answer(answer)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

    fuzz()
    print(f"{NUM_FUZZED} requests: {seen}")
    assert seen[200] > NUM_FUZZED / 10 < seen[400]
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
