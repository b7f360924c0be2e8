"""A replica over real HTTP without Ray: keys, limits, failures, streams of half characters. And its configuration."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.engine import Progress
from actors.generator import Generator, GeneratorConfig
from jobs import serve as serve_verb
from pipeline.config import ConfigError
from pipeline.service.answers import Choice
from pipeline.service.app import make_spec, replica_threads
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import Endpoint, settle_stall_s
from pipeline.service.errors import ApiError
from pipeline.service.keys import digest, read_keys
from pipeline.service.metrics import ours, urls
from pipeline.service.parse import parse_body, parse_completion
from pipeline.service.run import load
from skipdecode.request import Request, TokenLogprobs
from skipdecode.sampling import Sampling
from tests.support.service_helpers import DEMO, ROOT, free_port, local, make_endpoint, scripted

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


def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """The `choices` entries of a stream of one prompt."""
    asked = {"prompt": "a", "max_tokens": 4, "stream": True} | body
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=30) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:])["choices"][0] for line in lines[:-1]]


def slow_down(endpoint: Endpoint, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = endpoint.engine.turn
    monkeypatch.setattr(endpoint.engine, "turn", lambda: (time.sleep(seconds), step())[1])


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
        assert httpx.get(f"{url}/v1/models").status_code == httpx.get(f"{url}/metrics").status_code == 401
        key = {"Authorization": "Bearer first-key"}
        assert "come from Ray" in httpx.get(f"{url}/metrics", headers=key).json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/").status_code == 200
    endpoint.close()


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
    closed = auth.model_copy(update={"open_on_loopback": False})
    with pytest.raises(ConfigError, match=r"auth\.open_on_loopback: false, and there are no API keys"):
        read_keys(closed)  # the variable was set in another shell
    assert read_keys(closed.model_copy(update={"api_keys_file": str(tmp_path / "keys")}))
    for content in (None, "\n"):
        (tmp_path / "keys").unlink() if content is None else (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="api_keys_file"):
            read_keys(with_file)


def test_behind_a_proxy_of_rays_keys_are_a_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the replica's own machine, sets no header that says for whom it speaks, and listens everywhere."""
    auth = ServeConfig().auth
    monkeypatch.delenv(auth.api_keys_env, raising=False)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match=r"auth: .*RAY_SERVE_ENABLE_HA_PROXY"):
        read_keys(auth)
    monkeypatch.setenv(auth.api_keys_env, "key-number-1")
    assert read_keys(auth) == (digest("key-number-1"),)
    monkeypatch.delenv(auth.api_keys_env)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert read_keys(auth) == ()


def test_a_key_may_have_any_letters(generator: Generator) -> None:
    endpoint = make_endpoint(generator, [digest("schlüssel-🔑-1"), digest("clé-secrète"), digest("voilà")])
    with local(endpoint) as url:
        for key, status in (
            ("schlüssel-🔑-1".encode(), 200), ("clé-secrète".encode(), 200), ("clé-secrète".encode("latin-1"), 200),
            ("voilà".encode(), 200), ("clé-secrete".encode(), 401), (b"\xff\xfe", 401),
        ):  # fmt: skip
            answer = httpx.get(f"{url}/v1/models", headers={"Authorization": b"Bearer " + key})
            assert answer.status_code == status, key
    endpoint.close()


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
    slow_down(endpoint, 0.02, monkeypatch)
    assert error_of(post(url, max_tokens=100, ignore_eos=True)) == (408, "timeout")
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    ) as answer:
        assert answer.status_code == 200  # it had begun
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
    time.sleep(0.1)
    assert endpoint.thread.num_running == endpoint.num_responses == 0


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 0.3}}], indirect=True)
def test_a_body_that_does_not_come_is_408(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("endpoint", [{"engine": {"batch_size": 1}, "limits": {"max_waiting": 1}}], indirect=True)
def test_a_full_queue_reads_no_bodies(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, step = threading.Event(), endpoint.engine.turn
    monkeypatch.setattr(endpoint.engine, "turn", lambda: (is_free.wait(30), step())[1])
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(post, url)
        while not endpoint.thread.num_waiting:
            time.sleep(0.01)
        answer = httpx.post(f"{url}/v1/completions", content=b"{")
        is_free.set()
    assert error_of(answer) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert inside.result().status_code == 200


def test_a_large_body_does_not_hold_up_others(url: str, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = generator.tokenizer.encode
    monkeypatch.setattr(generator.tokenizer, "encode", lambda texts: (time.sleep(0.1), encode(texts))[1])
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, url, prompt=["a " * 500] * 10)
        time.sleep(0.2)
        began = time.monotonic()
        assert httpx.get(f"{url}/health").status_code == 200
        assert time.monotonic() - began < 0.5
        assert not large.done()
    assert error_of(large.result()) == (400, "invalid_value")


def test_draining(url: str, endpoint: Endpoint) -> None:
    endpoint.is_draining = True
    assert error_of(post(url)) == (503, "draining")
    assert error_of(post(url, stream=True)) == (503, "draining")
    assert error_of(httpx.post(f"{url}/v1/completions", content=b"{")) == (503, "draining")
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


@pytest.mark.slow
def test_a_slow_model_may_take_longer_over_a_prompt(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one long request would restart the replica again and again."""
    assert settle_stall_s(generator, ServeConfig.model_validate({"limits": {"stall_s": 200}})) == 200
    config = ServeConfig.model_validate({"limits": {"stall_s": 20}})
    embed = generator.model.embed

    def slow(tokens: Any, positions: Any) -> Any:
        time.sleep(0.004 * tokens.shape[-1])
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", slow)
    assert 0.004 * 4096 * 2 < settle_stall_s(generator, config) < 300


# Streams


def test_streams_of_arbitrary_bytes_split_no_character(url: str, generator: Generator) -> None:
    """A model of random weights writes bytes that are characters only now and then."""
    for seed in range(6):
        body = {"prompt": "🙂", "max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        choice = post(url, **body, return_token_ids=True).json()["choices"][0]
        whole = generator.tokenizer.decode(choice["token_ids"])
        assert choice["text"] == whole
        parts = [entry["text"] for entry in stream(url, **body)]
        assert "".join(parts) == whole
        assert len(parts) > 2


TEXT = "ж!é🦊!b"


@pytest.fixture(scope="module")
def letters(generator: Generator) -> list[list[int]]:
    """The tokens of each character of TEXT; several, where it is not ASCII."""
    return [tokens[1:] for tokens in generator.tokenizer.encode(list(TEXT))]


@pytest.fixture(scope="module")
def script(letters: Sequence[list[int]]) -> list[int]:
    return [token for tokens in letters for token in tokens]


@pytest.fixture(scope="module")
def saying(script: list[int], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """Says TEXT, over and over, one token at each position."""
    return scripted(tiny_checkpoint, tmp_path_factory.mktemp("scripted"), script * (120 // len(script)))


@pytest.mark.parametrize("stop", [None, "!!", "🦊!"])
def test_a_stream_is_the_answer_with_all_about_its_tokens(
    saying: Generator, letters: list[list[int]], script: list[int], stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and layers of half characters too, and of text that might have begun a stop string."""
    assert [len(tokens) > 1 for tokens in letters] == [not char.isascii() for char in TEXT]
    endpoint = make_endpoint(saying, limits={"stream_events_per_s": 1e6})
    slow_down(endpoint, 0.005, monkeypatch)  # so that each token is an event of its own
    body = {"prompt": "", "max_tokens": len(script), "temperature": 0, "stop": stop}
    with local(endpoint) as url:
        bare = stream(url, **body)
        body |= {"logprobs": 1, "return_layers": True}
        entries = stream(url, **body)
        whole = post(url, **body).json()["choices"][0]
    endpoint.close()
    assert whole["text"] == (TEXT if stop != "🦊!" else TEXT[:3])
    for made in (bare, entries):
        assert "".join(entry["text"] for entry in made) == whole["text"]
        assert not any("\ufffd" in entry["text"] for entry in made)
        assert [entry["finish_reason"] for entry in made[:-1]] == [None] * (len(made) - 1)
    assert len(entries) > len(bare) > 2
    assert [layers for entry in entries for layers in entry["layers"]] == whole["layers"]
    for name, values in whole["logprobs"].items():
        assert [value for entry in entries for value in entry["logprobs"][name]] == values
    assert len(whole["layers"]) == len(whole["logprobs"]["tokens"]) == len(script if stop != "🦊!" else script[:-1])


@pytest.mark.parametrize("stop", [None, "!!"])
@pytest.mark.parametrize("has_prompt", [False, True])
def test_offsets_are_those_of_the_characters(
    saying: Generator, letters: list[list[int]], script: list[int], has_prompt: bool, stop: str | None
) -> None:
    endpoint = make_endpoint(saying)
    num_prompt = int(has_prompt)
    body = {"prompt": [2, *script * num_prompt], "max_tokens": 2 * len(script), "temperature": 0, "stop": stop}
    with local(endpoint) as url:
        choice = post(url, echo=True, logprobs=0, **body).json()["choices"][0]
    endpoint.close()
    assert choice["text"] == TEXT * (num_prompt + 2)
    parts = [len(tokens) for tokens in letters * (num_prompt + 2)]
    assert choice["logprobs"]["text_offset"] == [0, *(at for at, count in enumerate(parts) for _ in range(count))]


def test_the_drawn_token_is_among_the_likeliest(url: str) -> None:
    """As OpenAI has it: up to k + 1 of them."""
    body = {"max_tokens": 40, "temperature": 2.0, "seed": 1, "ignore_eos": True}
    for k in (0, 2):
        found = post(url, logprobs=k, **body).json()["choices"][0]["logprobs"]
        drawn = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))
        assert all(top[token] == logprob for token, logprob, top in drawn)
        assert {len(top) for _, _, top in drawn} == ({1} if k == 0 else {2, 3})


def test_of_tokens_with_one_text_the_likelier_counts() -> None:
    asked = parse_completion({"prompt": [0], "logprobs": 2}, max_prompts=1)
    choice = Choice(0, Request("", [0]), asked, lambda tokens: "".join("xxyz"[token] for token in tokens))
    scored = TokenLogprobs(-3.0, [(0, -0.5), (1, -1.5)])
    (top,) = choice.take(Progress(None, [2], [6], [scored]))["logprobs"]["top_logprobs"]  # type: ignore[arg-type]
    assert top == {"x": -0.5, "y": -3.0}


# Bodies


@pytest.mark.parametrize("key", ["temperature", "top_p", "presence_penalty"])
def test_numbers_that_no_float_can_hold(url: str, key: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=b'{"prompt": "x", "%s": 1%s}' % (key.encode(), b"0" * 400))
    assert error_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == key


def test_a_number_that_no_tensor_of_integers_can_hold(url: str) -> None:
    assert post(url, temperature=10**300).status_code == 200


def test_a_prompt_nested_to_any_depth() -> None:
    for depth in range(2, 1100):
        with pytest.raises(ApiError) as caught:
            parse_completion(parse_body(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"), max_prompts=1)
        assert caught.value.status == 400


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-be"])
def test_a_body_in_another_encoding_is_not_guessed(encoding: str) -> None:
    with pytest.raises(ApiError) as caught:  # its brackets were not counted
        parse_body('{"prompt": "a"}'.encode(encoding))
    assert caught.value.status == 400


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert parse_body('{"prompt": "a"}'.encode("utf-8-sig")) == {"prompt": "a"}


@pytest.mark.parametrize("body", [{"k" * 100_000: 1}, {"model": "m" * 100_000}, {"temperature": "t" * 100_000}])
def test_errors_do_not_repeat_what_was_sent(url: str, body: dict[str, Any]) -> None:
    answer = post(url, **body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 500


# The configuration


def test_the_file_is_a_serve_configuration() -> None:
    """`serve deploy` checks with this class."""
    tree = yaml.safe_load(Path(CONFIG).read_text())
    schema = ServeDeploySchema.model_validate(tree)
    assert schema.applications[0].import_path == "pipeline.service.app:build_app"
    ServeConfig.model_validate(schema.applications[0].args)


def test_overrides_and_options() -> None:
    file = load(CONFIG, ["engine.batch_size=7", "decode.speedup=3"], None, 1234)
    assert (file.args.engine.batch_size, file.args.decode.speedup, file.http.port) == (7, 3, 1234)
    assert file.deployment["max_ongoing_requests"] == 4096
    assert load(None, [], None, None).http.model_dump() == {"host": "127.0.0.1", "port": 8000}


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


def test_drafts_in_fixed_bits_are_for_cpus(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica is started for what no GPU has, or no model of that width."""
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)
    keys = ["engine.scheduler=cohort", "decode.lossless=auto", "sampling.deterministic=true"]
    assert make_spec(load(CONFIG, [f"model.source={DEMO}", *keys], None, None).args).generator.device == "cpu"
    with pytest.raises(ConfigError, match=r"decode\.lossless: .*hidden_size 48 is no multiple of 32"):
        make_spec(load(CONFIG, [f"model.source={tiny_checkpoint}", *keys], None, None).args)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"logging_config": {"log_level": "DEBUG"}}, "logging_config: `serve deploy`"),
        ({"applications": [{"runtime_env": {"pip": ["x"]}}]}, "applications.0.runtime_env: `serve deploy`"),
        (
            {"applications": [{"deployments": [{"name": "Other"}]}]},
            "deployments.0.name: must be Completions, got 'Other'",
        ),
        ({"applications": [{"deployments": [{"name": "Completions"}, {"name": "B"}]}]}, "deployments.1: there is one"),
    ],
)
def test_what_would_not_be_applied_is_refused(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    """The same file is good for `serve deploy`, which applies it."""
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "serve.yaml"), [], None, None)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("num_cores", "num_cpus", "threads"), [(8, 1, 7), (8, 0.5, 7), (8, 4, 3), (2, 4, 1), (1, 1, 1), (64, 16.0, 15)]
)
def test_threads_of_a_replica(num_cores: int, num_cpus: float, threads: int) -> None:
    assert replica_threads(num_cores, num_cpus) == threads


def test_a_quantized_replica_is_told_where_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would fail to load, and be started again for ever."""
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    given = [f"model.source={DEMO}", "model.quantization=int8"]
    config = make_spec(load(CONFIG, given, None, None).args).generator
    assert (config.device, config.dtype, config.quantization) == ("cpu", "bfloat16", "int8")
    with pytest.raises(ConfigError, match=r"model\.quantization: .* float32 on cpu"):
        make_spec(load(CONFIG, [*given, "model.dtype=float32"], None, None).args)


def test_threads_are_counted_where_the_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.service.app.worker_path", lambda source, folder: source)  # it would start Ray
    assert make_spec(load(CONFIG, [f"model.source={DEMO}"], None, None).args).generator.num_threads is None
    args = load(CONFIG, [f"model.source={DEMO}", "engine.num_threads=3"], None, None).args
    assert make_spec(args).generator.num_threads == 3


def test_another_host_needs_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPDECODE_API_KEYS", raising=False)
    assert serve_verb.main(["--config", CONFIG, "--host", "0.0.0.0", "--port", str(free_port())]) == 2
    assert "no API keys are configured; set SKIPDECODE_API_KEYS" in capsys.readouterr().err


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert serve_verb.main(["--config", CONFIG, "--port", url.rpartition(":")[2]]) == 2
    assert "cannot be had" in capsys.readouterr().err


def test_a_head_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.nodes()` waits for minutes when the head is down."""
    monkeypatch.setattr("pipeline.service.metrics.SCRAPE_S", 0.2)
    is_back, asked = threading.Event(), list[int]()

    def ask() -> list[str]:
        asked.append(1)
        assert is_back.wait(30)
        return ["http://node/metrics"]

    async def some_at_once() -> list[Any]:
        ticks = 0
        scrapes = [asyncio.ensure_future(urls(ask)) for _ in range(5)]
        while not all(scrape.done() for scrape in scrapes):
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10, "the event loop went on"
        return await asyncio.gather(*scrapes, return_exceptions=True)

    found = asyncio.run(some_at_once())
    assert [(error.status, error.body["error"]["code"]) for error in found] == [(503, "head_silent")] * 5
    assert len(asked) == 1
    is_back.set()
    assert asyncio.run(urls(ask)) == ["http://node/metrics"]


@pytest.mark.parametrize("endpoint", [{"limits": {"max_client_prompts": 3}}], indirect=True)
def test_one_client_has_its_share_and_no_more(generator: Generator, endpoint: Endpoint) -> None:
    with local(endpoint) as url:
        assert post(url, prompt=["a"] * 3).status_code == 200
        assert error_of(post(url, prompt=["a"] * 4)) == (400, "invalid_value"), "it would never have room"
        assert post(url, prompt=["a"] * 3).status_code == 200, "what is over counts no more"
    assert not endpoint._by_client

    async def two() -> None:
        one = [Request("r", [2], Sampling(max_new_tokens=2))]
        async with endpoint.answering(one * 3, "first"), endpoint.answering(one * 3, "second"):
            with pytest.raises(ApiError, match="3 prompts of yours"):
                async with endpoint.answering(one, "first"):
                    pytest.fail("there was room")

    asyncio.run(two())


def test_metrics_are_ours_alone() -> None:
    """Not those of a run, of another endpoint, or of anybody else on the same nodes."""
    page = [
        "# HELP ray_skipdecode_serve_waiting w",
        "# TYPE ray_skipdecode_serve_waiting gauge",
        'ray_skipdecode_serve_waiting{application="our \\"own\\"",replica="a"} 0',
        'ray_skipdecode_serve_requests_total{application="our \\"own\\"",status="200"} 2',
        'ray_skipdecode_serve_waiting{application="our",replica="b"} 1',
        'ray_skipdecode_serve_waiting{old_application="our \\"own\\""} 1',
        "# HELP ray_skipdecode_output_tokens_total t",
        'ray_skipdecode_output_tokens_total{run="r"} 5',
        'ray_other_total{application="our \\"own\\"",help="ray_skipdecode_serve_"} 1',
    ]
    assert ours([*page, *page], 'our "own"') == page[:4]
