"""A replica over real HTTP without Ray: streams of half characters, and log-probabilities of their tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.generator import Generator
from actors.serving.engine import Progress
from pipeline.service.answers import Choice
from pipeline.service.requests import CompletionRequest
from skipdecode.engine.request import Request
from skipdecode.engine.results import TokenLogprobs
from tests.support.service_helpers import local, make_endpoint, post, scripted, slow_down, stream


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
    asked = CompletionRequest.parse({"prompt": [0], "logprobs": 2})
    choice = Choice(0, Request("", [0]), asked, lambda tokens: "".join("xxyz"[token] for token in tokens))
    scored = TokenLogprobs(-3.0, [(0, -0.5), (1, -1.5)])
    (top,) = choice.take(Progress(None, [2], [6], [scored]))["logprobs"]["top_logprobs"]  # type: ignore[arg-type]
    assert top == {"x": -0.5, "y": -3.0}
