"""A replica over real HTTP without Ray: keys, limits, failures, half characters. And its configuration."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.generator import Generator, GeneratorConfig
from jobs import serve as serve_verb
from pipeline.config import ConfigError
from pipeline.service.app import make_spec
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import Endpoint
from pipeline.service.keys import check_caller, digest, is_loopback, read_keys
from pipeline.service.metrics import ours
from pipeline.service.run import load
from tests.service_helpers import DEMO, ROOT, free_port, local, make_endpoint

CONFIG = str(ROOT / "configs/serve.yaml")


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    decode = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
    return Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", num_threads=1))


@pytest.fixture
def endpoint(generator: Generator, request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    made = make_endpoint(generator, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture
def url(endpoint: Endpoint) -> Iterator[str]:
    with local(endpoint) as running:
        yield running


def post(url: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 4} | body, headers=headers, timeout=30
    )


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# Keys


def test_keys(generator: Generator) -> None:
    endpoint = make_endpoint(generator, [digest("first-key"), digest("second-key")])
    with local(endpoint) as url:
        assert error_of(post(url)) == (401, "invalid_api_key")
        for wrong in ("first-key", "Basic first-key", "Bearer", "Bearer third-key", "Bearer first-key2", "Bearer \xe9"):
            answer = httpx.post(
                f"{url}/v1/completions", json={"prompt": "a"}, headers={"Authorization": wrong.encode("latin-1")}
            )
            assert error_of(answer) == (401, "invalid_api_key"), wrong
        for right in ("Bearer first-key", "bearer second-key"):
            assert post(url, headers={"Authorization": right}).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/").status_code == 200
    endpoint.close()


def test_without_keys_only_loopback_is_answered() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost"):
        assert is_loopback(host)
        check_caller([], host, None)
    for host in ("10.0.0.5", "0.0.0.0", "192.0.2.1", "::ffff:10.0.0.1", "example.org", "", None):
        assert not is_loopback(host)
        with pytest.raises(Exception, match="no API keys") as caught:
            check_caller([], host, "Bearer anything")
        assert getattr(caught.value, "status", None) == 403


def test_keys_are_read_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = ServeConfig().auth
    monkeypatch.delenv(auth.api_keys_env, raising=False)
    assert read_keys(auth) == ()
    monkeypatch.setenv(auth.api_keys_env, "key-number-1, key-number-2")
    assert read_keys(auth) == (digest("key-number-1"), digest("key-number-2"))
    (tmp_path / "keys").write_text("key-number-3\n")
    with_file = auth.model_copy(update={"api_keys_file": str(tmp_path / "keys")})
    assert read_keys(with_file)[-1] == digest("key-number-3")
    monkeypatch.setenv(auth.api_keys_env, "short")
    with pytest.raises(ConfigError, match="fewer than 8"):
        read_keys(auth)
    monkeypatch.delenv(auth.api_keys_env)
    for content in (None, "\n"):
        (tmp_path / "keys").unlink() if content is None else (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="api_keys_file"):
            read_keys(with_file)


# Limits


@pytest.mark.parametrize(
    "endpoint",
    [{"engine": {"batch_size": 1, "max_cohorts": 1}, "limits": {"max_waiting": 2, "request_timeout_s": 60}}],
    indirect=True,
)
def test_a_full_queue_is_429_at_once(url: str, endpoint: Endpoint) -> None:
    async def flood() -> list[tuple[httpx.Response, float]]:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one() -> tuple[httpx.Response, float]:
                began = time.monotonic()
                body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
                answer = await client.post(f"{url}/v1/completions", json=body)
                return answer, time.monotonic() - began

            return await asyncio.gather(*(one() for _ in range(12)))

    answers = asyncio.run(flood())
    good = [answer for answer, _ in answers if answer.status_code == 200]
    refused = [(answer, seconds) for answer, seconds in answers if answer.status_code != 200]
    assert len(good) >= 2
    assert len(good) + len(refused) == 12
    assert len({answer.json()["choices"][0]["text"] for answer in good}) == 1
    for answer, seconds in refused:
        assert error_of(answer) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert seconds < 1  # measured more strictly under load, in test_serve_load
    assert post(url).status_code == 200


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 0.15}}], indirect=True)
def test_too_slow_is_408_and_frees_the_row(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    step = endpoint.engine.turn
    monkeypatch.setattr(endpoint.engine, "turn", lambda: (time.sleep(0.02), step())[1])
    assert error_of(post(url, max_tokens=100, ignore_eos=True)) == (408, "timeout")
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    ) as answer:
        assert answer.status_code == 200  # it had begun
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
    time.sleep(0.1)
    assert endpoint.thread.num_running == endpoint.num_open == 0


def test_draining(url: str, endpoint: Endpoint) -> None:
    endpoint.is_draining = True
    assert error_of(post(url)) == (503, "draining")
    assert error_of(post(url, stream=True)) == (503, "draining")
    assert httpx.get(f"{url}/health").json()["status"] == "draining"


# Failures


def test_a_dead_engine_is_503_for_all_and_health_is_red(
    url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.engine, "turn", lambda: 1 / 0)
    assert error_of(post(url)) == (503, "engine_dead")  # it was in flight
    assert error_of(post(url)) == (503, "engine_dead")
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "ZeroDivisionError" in health.json()["reason"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        endpoint.check()


def test_one_that_cannot_be_decoded_is_500_alone(
    url: str, endpoint: Endpoint, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = generator.model.embed

    def raising(tokens: Any, positions: Any) -> Any:
        if bool((tokens == 300).any()) and tokens.shape[1] > 1:
            raise RuntimeError("poison")
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            bodies = [{"prompt": [2, 5 + n if n != 2 else 300], "max_tokens": 4} for n in range(5)]
            return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))

    answers = asyncio.run(together())
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200, 200]
    assert "poison" in answers[2].json()["error"]["message"]


def test_streams_of_arbitrary_bytes_split_no_character(url: str, generator: Generator) -> None:
    """A model of random weights writes bytes that are characters only now and then."""
    for seed in range(6):
        body = {"prompt": "🙂", "max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        choice = post(url, **body, return_token_ids=True).json()["choices"][0]
        whole = generator.tokenizer.decode(choice["token_ids"])
        assert choice["text"] == whole
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        parts = [line["choices"][0]["text"] for line in lines]
        assert "".join(parts) == whole
        assert len(parts) > 2


# The configuration


def test_the_file_is_a_serve_configuration() -> None:
    """`serve deploy` checks with this class."""
    tree = yaml.safe_load(Path(CONFIG).read_text())
    schema = ServeDeploySchema.model_validate(tree)
    assert schema.applications[0].import_path == "pipeline.service.app:build_app"
    ServeConfig.model_validate(schema.applications[0].args)


def test_overrides_and_options() -> None:
    file = load(CONFIG, ["engine.batch_size=7", "decode.speedup=3"], None, 1234)
    assert (file.args.engine.batch_size, file.args.decode.speedup, file.http["port"]) == (7, 3, 1234)
    assert file.deployment["max_ongoing_requests"] == 4096
    assert load(None, [], None, None).http == {"host": "127.0.0.1", "port": 8000}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.batchsize=7"], "engine.batchsize: unknown key; did you mean 'batch_size'"),
        (["engine.scheduler=fifo"], "engine.scheduler:"),
        (["limits.max_waiting=0"], "limits.max_waiting:"),
        (["sampling.temperature=-1"], "sampling.temperature:"),
        (["model.source=nowhere/at/all"], "model.source: 'nowhere/at/all' is not a folder"),
        (["engine.scheduler=continuous", "sampling.deterministic=true"], "sampling.deterministic: needs fixed"),
        (["engine.scheduler=continuous", "decode.ffn_skip={mode: row}"], "decode.ffn_skip.mode: the continuous"),
        (["batch"], "expected key=value"),
    ],
)
def test_bad_configurations_name_the_key(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    with pytest.raises(ConfigError) as caught:
        make_spec(load(CONFIG, [f"model.source={DEMO}", *overrides], None, None).args)
    assert message in str(caught.value)


def test_another_host_needs_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    assert serve_verb.main(["--config", CONFIG, "--host", "0.0.0.0", "--port", str(free_port())]) == 2
    assert "no API keys are configured; set SKIPDECODE_API_KEYS" in capsys.readouterr().err


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert serve_verb.main(["--config", CONFIG, "--port", url.rpartition(":")[2]]) == 2
    assert "cannot be had" in capsys.readouterr().err


def test_metrics_are_ours_alone() -> None:
    page = ["# HELP ray_skipdecode_waiting w", "ray_skipdecode_waiting 0", "ray_other_total 1", 'x{a="skipdecode_"} 1']
    assert ours([*page, *page]) == page[:2]
