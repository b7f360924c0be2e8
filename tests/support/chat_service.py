"""A replica of a tiny model with a chat template, over real HTTP; how it is asked, and what it answers offline."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.templates.chat_template import check_messages
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.service_helpers import local, make_endpoint

DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
TEMPLATE = """\
</s>{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('I do not like this') }}{% endif %}\
{% if m.content == 'divide' %}{{ 1 // 0 }}{% endif %}\
{% if m.content == 'date' %}{{ strftime_now('%Y') }}{% endif %}\
{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
EXTENSIONS = (
    "return_token_ids", "row_id", "return_layers", "top_k", "continue_final_message", "add_generation_prompt"
)  # fmt: skip
USER = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Generator(GeneratorConfig(str(folder), DECODE, dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def url(generator: Generator) -> Iterator[str]:
    endpoint = make_endpoint(generator)
    with local(endpoint) as running:
        yield running
    endpoint.close()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def rendered(generator: Generator, messages: Any) -> list[int]:
    """By plain text, not by a template."""
    text = "</s>" + "".join(f"{m['role'][0]}:{m['content']}\n" for m in check_messages(messages)) + "a:"
    return generator.tokenizer.encode_rendered([text])[0]


def offline(generator: Generator, messages: Any, max_tokens: int, row_id: str = "", **sampling: Any) -> Completion:
    request = Request(row_id, rendered(generator, messages), Sampling(max_tokens, **sampling))
    (answer,) = generator([request]).answers
    assert isinstance(answer, Completion)
    return answer


def ask(client: openai.OpenAI, messages: Any = USER, **keys: Any) -> Any:
    own = {name: keys.pop(name) for name in EXTENSIONS if name in keys}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **keys}, extra_body=own
    )


def refused(client: openai.OpenAI, messages: Any = USER, **keys: Any) -> tuple[str | None, str | None, str]:
    own = keys.pop("extra", {})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": messages, **keys}, extra_body=own)
    error = caught.value
    return error.param, error.code, error.message
