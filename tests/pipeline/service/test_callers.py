"""An endpoint without keys answers programs on this machine, and neither web pages nor proxies. Real HTTP."""

import json
import socket
from collections.abc import Iterator
from functools import cache

import httpx2 as httpx
import openai
import pytest

from actors.generator import Generator
from pipeline.service.api_error import ApiError
from pipeline.service.auth import check_local, digest, is_loopback
from pipeline.service.endpoint import Endpoint
from tests.support.service_helpers import local, make_endpoint

ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
]  # fmt: skip
FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "localhost.evil.example"},
    {"Host": "127.0.0.6"},
    {"Host": "0.0.0.0:8000"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Origin": "http://localhost:3000"},  # another server on this machine
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"X-Forwarded-For": "10.0.0.5"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-Host": "evil.example"},
    {"X-Real-IP": "10.0.0.5"},
    {"Forwarded": "for=127.0.0.1"},
    {"Via": "1.1 somewhere"},
    {"CF-Connecting-IP": "10.0.0.5"},
    {"X-Envoy-External-Address": "10.0.0.5"},
    {"Fly-Client-IP": "10.0.0.5"},
    {"X-Cluster-Client-IP": "10.0.0.5"},
    {"Tailscale-User-Login": "somebody"},
    {"X-Scheme": "https"},
]


@pytest.fixture(scope="module")
def endpoint(generator: Generator) -> Iterator[Endpoint]:
    made = make_endpoint(generator)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(endpoint: Endpoint) -> Iterator[str]:
    with local(endpoint) as running:
        yield running


@cache
def session() -> httpx.Client:
    return httpx.Client(timeout=30)


def ask(url: str, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """As a page can without asking first: a body of plain text."""
    body = json.dumps({"prompt": "a", "max_tokens": 2}) if method == "POST" else None
    return session().request(method, url + path, content=body, headers={"Content-Type": "text/plain"} | headers)


@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: " ".join(*headers.items()))
def test_a_request_of_a_web_page_or_a_proxy_is_refused(
    url: str, endpoint: Endpoint, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    for name in ("of_completion", "of_chat"):
        monkeypatch.setattr(endpoint.prompts, name, asked.append)
    for method, path in ROUTES:
        answer = ask(url, method, path, headers)
        assert (answer.status_code, "error" in answer.json()) == (403, True), (path, headers)
        assert "access-control-allow-origin" not in answer.headers
    assert not asked, "the engine is not reached"


def test_a_request_without_a_host_or_with_two_is_refused(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for head in ("HTTP/1.0\r\n", f"HTTP/1.1\r\nHost: localhost:{port}\r\nHost: evil.example\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"GET /v1/models {head}\r\n".encode())
            status = connection.recv(200).split()[1]
        assert status in (b"400", b"403"), head  # two: which library reads the headers decides who refuses


def test_what_programs_and_the_page_send_is_answered(url: str) -> None:
    port = url.rpartition(":")[2]
    page = {"Origin": url, "Sec-Fetch-Site": "same-origin", "Referer": f"{url}/", "X-Request-Id": "a"}
    named = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}", "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, page, named, {"Host": "[::1]:8000"}, {"Sec-Fetch-Site": "none"}):
        assert ask(url, "POST", "/v1/completions", headers).status_code == 200, headers
        assert ask(url, "GET", "/v1/models", headers).status_code == 200, headers
    for path in ("/health", "/"):  # for a balancer, which knows no key; the page itself shows nothing
        assert ask(url, "GET", path, {"Host": "10.0.0.5"}).status_code == 200


def test_the_openai_client_is_answered(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
    assert list(client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True))


def test_with_keys_the_key_decides(generator: Generator) -> None:
    """The endpoint may then stand behind a proxy, under any name."""
    made = make_endpoint(generator, [digest("first-key")])
    with local(made) as url:
        for headers in FOREIGN[:: len(FOREIGN) // 5]:
            answer = ask(url, "GET", "/v1/models", headers | {"Authorization": "Bearer first-key"})
            assert answer.status_code == 200, headers
            assert ask(url, "GET", "/v1/models", headers).status_code == 401
    made.close()


def test_who_is_local() -> None:
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert is_loopback(peer)
        check_local(peer, [("Host", "localhost:8000")])
    for peer in (
        "127.0.0.6",
        "127.8.0.1",
        "::ffff:127.0.0.6",
        "10.0.0.5",
        "0.0.0.0",
        "::ffff:10.0.0.1",
        "a.b",
        "",
        None,
    ):
        assert not is_loopback(str(peer))
        with pytest.raises(ApiError, match="answers loopback") as caught:
            check_local(peer, [("Host", "localhost:8000")])
        assert (caught.value.status, caught.value.body["error"]["code"]) == (403, "loopback_only")
